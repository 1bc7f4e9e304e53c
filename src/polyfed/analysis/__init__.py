"""Figures of finished runs and the numbers behind them, from run folders: what `polyfed plot` draws."""

from polyfed.analysis.plotting import FIGURES, Plot, plot

__all__ = ["FIGURES", "Plot", "plot"]
