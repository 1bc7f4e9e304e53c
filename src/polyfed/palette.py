"""The colors of lines, in figures and in notebooks alike; imports nothing.

The first seven are Okabe and Ito's, safe for the color-blind; the others lie as far from these, from each other, from
white and from black as colors can.
"""

COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C9A", "#555500", "#880022", "#AACC33",
    "#005555", "#FFAA99", "#776666", "#FF0044", "#9988FF", "#999988", "#663300", "#BB1177", "#CC00FF", "#00CCCC",
)  # fmt: skip
