"""The comparison table against numbers worked out by hand."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.comparison import compare_runs, to_csv, to_json, to_latex, to_markdown, to_text, write
from polyfed.report.comparison_formats import to_html
from polyfed.report.run_records import load_runs


def test_two_methods_two_seeds(two_by_two: Path) -> None:
    (section,) = compare_runs(load_runs(two_by_two)).sections
    local, fedgh = section.rows
    assert (local.name, fedgh.name) == ("local", "fedgh")  # Local first, though found last
    assert local.accuracy == pytest.approx(0.52)
    assert fedgh.accuracy == pytest.approx(0.65)
    assert local.accuracy_std_seeds == pytest.approx(0.04 / 2**0.5)  # two values d apart: d / sqrt(2)
    assert fedgh.accuracy_std_seeds == pytest.approx(0.10 / 2**0.5)
    assert fedgh.accuracy_std_clients == pytest.approx(0.1)
    assert fedgh.accuracy_min_client == pytest.approx(0.55)  # mean of 0.5 and 0.6
    assert fedgh.accuracy_best_by_validation == pytest.approx(0.55)
    assert local.accuracy_best_by_validation is None
    assert fedgh.accuracy_by_stage == pytest.approx({"personal": 0.65, "received": 0.45})
    assert fedgh.difference == pytest.approx(0.13)  # mean of 0.60 - 0.50 and 0.70 - 0.54
    assert fedgh.difference_std == pytest.approx(0.06 / 2**0.5)
    assert fedgh.difference_seeds == (0, 1)
    assert local.difference is None
    assert (fedgh.bytes_up, fedgh.bytes_down, fedgh.seconds) == (3072, 6144, 4.5)


def test_the_caption_says_what_was_measured(two_by_two: Path) -> None:
    table = compare_runs(load_runs(two_by_two))
    wanted = (
        "digits (dirichlet, dirichlet_alpha=0.5), 2 clients, 3 rounds, seeds 0, 1. "
        "Accuracy: stage personal, on each client's own test data, plain mean over clients."
    )
    assert table.sections[0].caption == wanted
    assert wanted in to_markdown(table)
    assert "stage personal" in to_latex(table)
    assert " ".join(to_text(table).split()).startswith(wanted)
    received = compare_runs(load_runs(two_by_two), stage="received")
    assert "stage received" in received.sections[0].caption
    assert received.sections[0].rows[1].accuracy == pytest.approx(0.45)
    assert received.sections[0].rows[1].accuracy_best_by_validation is None  # that is the personal stage's


def test_text_shows_the_numbers_and_fits(two_by_two: Path) -> None:
    text = to_text(compare_runs(load_runs(two_by_two)))
    (line,) = [line for line in text.splitlines() if line.startswith("fedgh ")]  # two seeds: no intervals
    assert line.split() == [
        *("fedgh", "65.00", "±", "7.07", "+13.00", "±", "4.24", "10.00", "55.00", "55.00", "45.00"),
        *("3.0", "KiB", "6.0", "KiB", "4.5", "s"),
    ]
    assert max(map(len, text.splitlines())) <= 100
    assert to_text(compare_runs(load_runs(two_by_two)), ascii_only=True).isascii()


def test_a_client_whose_single_row_weighs_much_is_named(make: Any) -> None:
    """Two clients of 1 and 9 test rows: each row of the first is 50 points of the mean, and 10 over all rows."""
    for method, accuracy in (("local", 0.5), ("fedgh", 0.7)):
        rows = [
            {"id": number, "architecture": "cnn", "samples": 9, "test_samples": count, "accuracy": accuracy + more}
            for number, (count, more) in enumerate(((1, -0.1), (9, 0.1)))
        ]
        make(method, method, 0, (accuracy,), clients_table=rows, client_names=["tiny", "north"])
    (section,) = compare_runs(load_runs(make.root)).sections
    few, instead = [note for note in section.notes if "rows" in note]
    assert few.startswith("few test rows: client 0 ('tiny') has 1, each 50.0 points of the mean over clients; client 1")
    assert instead == "the mean over all test rows (evaluation.weighting = 'samples') instead: local 58.00, fedgh 78.00"


def test_long_names_wrap_within_a_hundred_columns(make: Any) -> None:
    for seed in (0, 1):
        make(f"local-{seed}", seed=seed)
        for epochs in (1, 100):
            hyperparameters = {"header_epochs": epochs, "header_batch": 10 * epochs, "header_lr": 0.01 * epochs}
            make(
                f"gh-{epochs}-{seed}",
                "fedgh",
                seed,
                hyperparameters=hyperparameters,
                accuracy_best_by_validation=0.5,
                refused=3,
            )
    text = to_text(compare_runs(load_runs(make.root)))
    assert max(map(len, text.splitlines())) <= 100
    assert "(header_epochs=1" in text
    assert "refused" in text


@pytest.mark.parametrize("width", [60, 80])
def test_on_a_narrow_terminal_the_table_is_cut(make: Any, two_by_two: Path, width: int) -> None:
    make("fedgh-2", "fedgh", 2, (0.5, 0.6, 0.65), accuracy_best_by_validation=0.6)
    make("local-2", "local", 2, (0.3, 0.4, 0.52))
    text = to_text(compare_runs(load_runs(two_by_two)), width, metrics=True)
    assert max(map(len, text.splitlines())) <= width
    blocks = [block for block in text.split("\n\n") if "---" in block]
    assert len(blocks) > 1
    assert all("\nlocal" in block and "\nfedgh" in block for block in blocks)
    assert sum(block.count("vs Local") for block in blocks) == 1
    assert sum(block.count("minus") for block in blocks) == 1
    assert sum(block.count("KiB") for block in blocks) == 4


def test_intervals_and_the_best_rival(make: Any) -> None:
    values = {"local": (0.9, 0.95, 1.0), "fedavg": (0.5, 0.6, 0.7), "fedgh": (0.7, 0.6, 0.65), "fedin": (0.6, 0.8, 0.7)}
    for method, each in values.items():
        for seed, accuracy in enumerate(each):
            make(f"{method}-{seed}", method, seed, (accuracy,), accuracy_best_by_validation=accuracy)
    make("fedrep-0", "fedrep", 0, (0.99,))  # the highest, on one of the three seeds only
    (section,) = compare_runs(load_runs(make.root)).sections
    rows = {row.name: row for row in section.rows}
    t = 4.302652730  # t(0.975, 2)
    assert rows["fedin"].accuracy_margin == pytest.approx(t * 0.1 / 3**0.5)  # s = 0.1
    assert rows["fedin"].accuracy_best_margin == pytest.approx(t * 0.1 / 3**0.5)
    assert rows["fedin"].difference == pytest.approx(-0.25)  # of -0.3, -0.15 and -0.3
    assert rows["fedin"].difference_margin == pytest.approx(t * 0.05)  # s = 0.15 / sqrt(3)
    assert {name: row.rival for name, row in rows.items()} == {
        "local": "", "fedavg": "fedin", "fedgh": "fedin", "fedin": "fedgh", "fedrep": "fedgh",
    }  # fmt: skip
    fedgh = rows["fedgh"].against_rival
    assert (fedgh.mean, fedgh.seeds) == (pytest.approx(-0.05), (0, 1, 2))  # of +0.1, -0.2 and -0.05
    assert fedgh.margin == pytest.approx(t * 0.15 / 3**0.5)
    assert rows["fedin"].against_rival.mean == pytest.approx(0.05)
    assert rows["fedrep"].against_rival.margin is None
    text = to_markdown(compare_runs(load_runs(make.root)))
    assert "| fedin | [45.16, 94.84] | [-46.51, -3.49] | fedgh |" in text
    assert "| local | [82.58, 100.00] | - |" in text  # 107.42 can be no accuracy
    found = json.loads(to_json(compare_runs(load_runs(make.root))))["tables"][0]["rows"]
    assert [row["against_rival"]["mean"] for row in found if row["name"] == "fedgh"] == [fedgh.mean]


SEEN = {"local": (0.5, 0.4, 0.6), "fedavg": (0.70, 0.60, 0.80), "fedgh": (0.72, 0.62, 0.82)}  # +0.02 on every seed
BOLD = (
    "bold: the highest of its column, where the 95 % interval of its difference to each other row, paired by seed, "
    "leaves out zero: "
)


def test_bold_is_what_leads_beyond_chance(make: Any) -> None:
    for name, values in SEEN.items():
        for seed, accuracy in enumerate(values):
            make(f"{name}-{seed}", name, seed, (accuracy,), accuracy_best_by_validation=0.7 - 0.1 * seed)
    table = compare_runs(load_runs(make.root))
    (section,) = table.sections
    assert section.leaders == dict.fromkeys(("accuracy", "personal", "received"), "fedgh")
    assert to_markdown(table).count("**72.00 ± 10.00**") == 1
    assert to_latex(table).count(r"\textbf{72.00 $\pm$ 10.00}") == 1
    assert re.findall(r"font-weight:bold[^>]*>([^<]+)<", to_html(table)).count("72.00 ± 10.00") == 2  # both tables
    assert "70.00**" not in to_markdown(table)
    assert "*" not in to_text(table)
    assert f"{BOLD}fedgh (accuracy, stage personal, stage received)" in section.notes
    assert json.loads(to_json(table))["tables"][0]["leaders"] == section.leaders


@pytest.mark.parametrize(
    "values",
    [
        {name: found[:2] for name, found in SEEN.items()},
        {name: found[:1] for name, found in SEEN.items()},
        {**SEEN, "fedin": (0.70, 0.65, 0.82)},  # -0.02, 0.03, 0 to fedgh
        {**SEEN, "fedin": (0.10, 0.63, 0.83)},  # further behind than the next, and cannot be told from fedgh
        {**SEEN, "fedhenn": (0.2,)},
        {"fedgh": SEEN["fedgh"]},
    ],
    ids=["two seeds", "one seed", "not distinguishable", "not from a row further down", "nor from a seed", "alone"],
)
def test_nothing_is_bold_without_an_interval_that_supports_it(make: Any, values: dict[str, tuple[float, ...]]) -> None:
    for name, found in values.items():
        for seed, accuracy in enumerate(found):
            make(f"{name}-{seed}", name, seed, (accuracy,))
    table = compare_runs(load_runs(make.root))
    (section,) = table.sections
    assert section.leaders == {}
    assert "**7" not in to_markdown(table)
    assert "textbf" not in to_latex(table)
    assert "bold" not in " ".join(section.notes)
    if len(section.facts.seeds) == 2:
        assert "two seeds: no interval is told, which takes three" in section.notes
        assert "95 %" not in to_text(table) + to_markdown(table) + to_latex(table)


@pytest.mark.parametrize(("accuracy", "leaders"), [(0.1, "fedgh"), (0.9, None)])
def test_what_has_learnt_nothing_leads_nowhere(accuracy: float, leaders: str | None, make: Any) -> None:
    for name, values in {**SEEN, "fedin": (accuracy,) * 3}.items():
        for seed, value in enumerate(values):
            lost = "nothing was learnt" if name == "fedin" else None
            make(f"{name}-{seed}", name, seed, (value,), nothing_learnt=lost)
    (section,) = compare_runs(load_runs(make.root)).sections
    assert section.leaders.get("accuracy") == leaders
    assert section.finding.startswith("fedgh leads with 72.00 %")
    assert section.finding.endswith(" Nothing was learnt by fedin.")
    assert [row.nothing_learnt for row in section.rows] == [0, 0, 0, 3]
    assert "fedin: nothing was learnt" in section.notes


def test_latex_fits_a_column_and_knows_a_minus_from_a_hyphen(make: Any) -> None:
    for name, values in {**SEEN, "fedgh": (0.22, 0.12, 0.35)}.items():
        for seed, accuracy in enumerate(values):
            label = "fedgh-with-a-long-name" if name == "fedgh" else None
            make(f"{name}-{seed}", name, seed, (accuracy,), **figures(0.3, 0.2, cnn1=0.5, cnn2=0.7), label=label)
    text = to_latex(compare_runs(load_runs(make.root)))
    tables = re.findall(r"begin\{tabular\}\{(\S+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert len(tables) > 4
    for form, table in tables:
        assert form.startswith("p{8em}")
        plain = re.sub(r"\\(?:shortstack\[.\]|textbf)\{(.*?)(?:\\\\.*?)?\}", r"\1", table)
        plain = plain.replace(r"$\pm$", "±").replace("$-$", "-")
        columns = zip(
            *(line.removesuffix(r" \\").split(" & ") for line in plain.splitlines() if "&" in line), strict=True
        )
        names, *numbers = ([len(cell) for cell in column] for column in columns)
        assert min(16, max(names)) + sum(2 + max(column) for column in numbers) <= 56
    assert r"fedgh-with-a-long-name & 23.00 $\pm$ 11.53 & $-$27.00 $\pm$ 1.73 &" in text


def test_latex_means_what_it_says(make: Any) -> None:
    make("a", "fedgh", 0, label=r"50% & {a}_b #1 $x ~^ \ |<>")
    text = to_latex(compare_runs(load_runs(make.root)))
    wanted = r"50\% \& \{a\}\_b \#1 \$x \textasciitilde{}\textasciicircum{} \textbackslash{} \textbar{}$<$$>$ & "
    assert wanted in text
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == text.count(r"\toprule") == 1


def test_a_target_is_told(two_by_two: Path) -> None:
    (section,) = compare_runs(load_runs(two_by_two), target="90 % of best").sections
    local, fedgh = (row.to_target for row in section.rows)
    assert local is not None
    assert fedgh is not None
    assert fedgh.accuracy == pytest.approx(0.585)
    assert (local.reached, fedgh.reached, fedgh.rounds, fedgh.by_seed) == (0, 2, 2.5, {0: 3, 1: 2})
    (note,) = [note for note in section.notes if note.startswith("target")]
    assert note.startswith("target 90 % of best, 58.50 %: first scored round")
    text = to_text(compare_runs(load_runs(two_by_two), target=0.585))
    assert ["fedgh", "2", "of", "2", "0", "2.5", "±", "0.7", "7.5", "KiB", "3.8", "s"] in [
        line.split() for line in text.splitlines()
    ]
    assert "target_rounds" in to_csv(compare_runs(load_runs(two_by_two), target=0.6)).splitlines()[0]
    alone = compare_runs(load_runs(two_by_two / "fedgh-0"), target="90 % of local").sections[0]
    assert alone.rows[0].to_target is None
    assert "no target: 90 % of local is not known, as there is no such accuracy" in alone.notes
    with pytest.raises(ConfigError, match="target: expected"):
        compare_runs(load_runs(two_by_two), target="a lot")


def test_one_seed_has_no_spread(make: Any) -> None:
    make("local", "local", 0, (0.5, 0.5))
    make("fedgh", "fedgh", 0, (0.5, 0.75))
    table = compare_runs(load_runs(make.root))
    local, fedgh = table.sections[0].rows
    assert (local.accuracy_std_seeds, fedgh.accuracy_std_seeds, fedgh.difference_std) == (None, None, None)
    assert fedgh.difference == 0.25
    assert "±" not in to_text(table) + to_markdown(table)
    assert "seed 0." in table.sections[0].caption
    assert (fedgh.accuracy_margin, fedgh.difference_margin, fedgh.accuracy_best_margin) == (None, None, None)
    assert "one seed: neither a spread nor an interval is known" in table.sections[0].notes
    assert "95 %" not in to_text(table)
    (line,) = [line for line in csv.DictReader(io.StringIO(to_csv(table))) if line["name"] == "fedgh"]
    assert line["accuracy_std_seeds"] == line["difference_std"] == ""


def test_equal_seeds_do_have_a_spread_of_zero(make: Any) -> None:
    make("a", seed=0)
    make("b", seed=1)
    make("c", "fedgh", seed=0)
    table = compare_runs(load_runs(make.root))
    assert table.sections[0].rows[0].accuracy_std_seeds == 0.0
    assert "60.00 ±    -" in to_text(table)  # fedgh has one seed where local has two
    assert "| method | seeds |" in to_markdown(table)


def test_differences_are_paired_on_shared_seeds(make: Any) -> None:
    make("local-0", "local", 0, (0.5,))
    make("local-1", "local", 1, (0.9,))
    make("fedgh-0", "fedgh", 0, (0.625,))
    make("fedin-7", "fedin", 7, (0.6,))
    _, fedgh, fedin = compare_runs(load_runs(make.root)).sections[0].rows
    assert (fedgh.difference, fedgh.difference_std, fedgh.difference_seeds) == (0.125, None, (0,))
    assert (fedin.difference, fedin.difference_seeds) == (None, ())


def test_csv_and_json_keep_exact_bytes(make: Any) -> None:
    make("a", "fedgh", 0, bytes_up=123_456_789_012_345_677, label='odd, "name" | x_y')
    make("b", "local", 0, bytes_up=7)
    table = compare_runs(load_runs(make.root))
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [line["name"] for line in lines] == ["local", 'odd, "name" | x_y']
    assert lines[1]["bytes_up"] == "123456789012345677"
    assert (lines[1]["dataset"], lines[1]["rounds"], lines[1]["test"], lines[1]["seeds"]) == (
        "digits",
        "2",
        "client",
        "0",
    )
    assert float(lines[1]["accuracy_received"]) == pytest.approx(0.4)
    found = json.loads(to_json(table))["tables"][0]
    assert found["rows"][1]["bytes_up"] == found["rows"][1]["runs"][0]["bytes_up"] == 123_456_789_012_345_677
    assert found["caption"] == table.sections[0].caption
    assert 'odd, "name" \\| x_y' in to_markdown(table)
    assert r"x\_y" in to_latex(table)


def test_bytes_that_differ_by_seed_are_averaged(make: Any) -> None:
    make("a", seed=0, bytes_up=10)
    make("b", seed=1, bytes_up=13)
    (row,) = compare_runs(load_runs(make.root)).sections[0].rows
    assert row.bytes_up == 11.5
    assert [run.bytes_up for run in row.runs] == [10, 13]


def test_different_data_or_rounds_are_different_tables(make: Any) -> None:
    make("a", accuracies=(0.5,))
    make("b", accuracies=(0.5, 0.6))
    make("c", accuracies=(0.5,), data={"dirichlet_alpha": 0.1})
    make("d", accuracies=(0.5,), data={"max_train_per_client": 50, "root": "/elsewhere"})
    make("e", "fedgh", accuracies=(0.5,), data={"root": "/elsewhere"})
    sections = compare_runs(load_runs(make.root)).sections
    assert [len(section.rows) for section in sections] == [2, 1, 1, 1]
    starts = [section.caption.split(", seed")[0] for section in sections]
    assert starts == [
        "digits (dirichlet, dirichlet_alpha=0.5), 2 clients, 1 rounds",
        "digits (dirichlet, dirichlet_alpha=0.5), 2 clients, 2 rounds",
        "digits (dirichlet, dirichlet_alpha=0.1), 2 clients, 1 rounds",
        "digits (dirichlet, dirichlet_alpha=0.5, max_train_per_client=50), 2 clients, 1 rounds",
    ]


def test_other_settings_that_differ_are_told(make: Any) -> None:
    make("a", "local", training={"lr": 0.1})
    make("b", "fedgh")
    assert "training.lr differs: 0.1 for local; 0.01 for fedgh" in compare_runs(load_runs(make.root)).sections[0].notes


def test_methods_with_stages_of_their_own_are_shown_as_such(make: Any) -> None:
    make("a", "local", 0, (0.5,), stages=["personal"])
    make("b", "fedavg", 0, (0.75,), stage="received")
    table = compare_runs(load_runs(make.root))
    (section,) = table.sections
    assert "each method's own stage (personal or received)" in section.caption
    assert section.rows[1].difference == 0.25
    assert "fedavg: its stage received is compared with Local's stage personal" in section.notes
    assert [row.stage for row in section.rows] == ["personal", "received"]
    assert section.extra_stages == ["personal", "received"]
    assert "| stage |" in to_markdown(table)


def test_refusals_and_missing_values(make: Any) -> None:
    make("a", refused=2, accuracy=None, accuracy_by_stage=None, accuracy_per_client=None)
    table = compare_runs(load_runs(make.root))
    assert table.sections[0].rows[0].refused == 2
    assert "refused" in to_text(table)
    make("b", seed=1, accuracy=float("nan"), accuracy_by_stage={})
    assert (
        "nan" not in (to_text(compare_runs(load_runs(make.root))) + to_json(compare_runs(load_runs(make.root)))).lower()
    )


def test_requests_that_cannot_be_met(make: Any, tmp_path: Path) -> None:
    make("a")
    make("b")
    with pytest.raises(ConfigError, match="two runs are 'local' with seed 0"):
        compare_runs(load_runs(make.root))
    runs = load_runs(make.root / "a")
    with pytest.raises(ConfigError, match="not scored in stage 'recieved'; it has: personal, received"):
        compare_runs(runs, stage="recieved")
    with pytest.raises(ConfigError, match="unknown table format 'markdown'"):
        write(compare_runs(runs), tmp_path, formats=["csv", "markdown"])
    assert not (tmp_path / "comparison.csv").exists()
    make("c", finished=False)
    with pytest.raises(ConfigError, match="no finished run"):
        compare_runs(load_runs(make.root / "c"))


def test_unfinished_runs_are_listed_under_the_table(make: Any) -> None:
    make("a")
    make("b", "fedgh", finished=False)
    table = compare_runs(load_runs(make.root))
    assert len(table.sections[0].rows) == 1
    assert "left out" in table.notes[0]
    for text in (to_text(table), to_markdown(table), to_latex(table), to_json(table)):
        assert "unfinished" in text


def test_write(two_by_two: Path, tmp_path: Path) -> None:
    table = compare_runs(load_runs(two_by_two))
    files = write(table, tmp_path / "deep" / "out", formats=["md", "csv", "json", "tex", "txt"])
    assert [file.name for file in files] == [f"comparison.{end}" for end in ("md", "csv", "json", "tex", "txt")]
    assert files[0].read_text(encoding="utf-8") == to_markdown(table)
    assert files[1].read_bytes().decode("utf-8") == to_csv(table)
    assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == sorted(file.name for file in files)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot"):
        write(table, tmp_path / "file")


# the figures beside the accuracy --------------------------------------------------------------------------------------


def figures(f1: float, tenth: float, **architectures: float) -> dict[str, Any]:
    """What a result says beside the accuracies; AUC was not recorded."""
    return {
        "accuracy_by_stage": {"personal": {"mean": 0.5, "std": 0.1, "min": 0.2, "max": 0.9, "bottom_decile": tenth}},
        "metrics": {"personal": {"balanced_accuracy": {"mean": 0.4}, "f1": {"mean": f1}}},
        "accuracy_per_architecture": {name: {"mean": mean} for name, mean in architectures.items()},
    }


def with_figures(make: Any) -> Any:
    """Local and two seeds of FedGH, on two architectures; returns the table."""
    make("local", **figures(0.30, 0.20, cnn1=0.5, cnn2=0.7))
    make("fedgh-0", "fedgh", 0, **figures(0.40, 0.25, cnn1=0.6, cnn2=0.8))
    make("fedgh-1", "fedgh", 1, **figures(0.50, 0.35, cnn1=0.7, cnn2=0.8))
    return compare_runs(load_runs(make.root))


def test_figures_are_means_over_seeds(make: Any) -> None:
    local, fedgh = with_figures(make).sections[0].rows
    assert local.metrics == {"balanced_accuracy": 0.4, "f1": 0.3}
    assert fedgh.metrics == pytest.approx({"balanced_accuracy": 0.4, "f1": 0.45})
    assert fedgh.accuracy_bottom_decile == pytest.approx(0.30)
    assert fedgh.accuracy_per_architecture == pytest.approx({"cnn1": 0.65, "cnn2": 0.8})


def test_figures_in_every_file_and_on_request_on_the_terminal(make: Any) -> None:
    table = with_figures(make)
    markdown = to_markdown(table)
    (head,) = [line for line in markdown.splitlines() if line.startswith("| method | ") and "std clients" in line]
    assert "| lowest tenth | balanced accuracy | macro F1 | bytes up |" in head
    assert "AUC" not in markdown
    (line,) = [line for line in markdown.splitlines() if line.startswith("| fedgh | ") and "KiB" in line]
    assert "| 30.00 | 40.00 | 45.00 | 2.0 KiB |" in line
    assert "Accuracy in % by architecture:\n\n| method | cnn1 | cnn2 |" in markdown
    assert "| fedgh | 65.00 | 80.00 |" in markdown
    assert "macro F1" not in to_latex(table)
    found = list(csv.DictReader(io.StringIO(to_csv(table))))[1]
    assert float(found["f1"]) == pytest.approx(0.45)
    assert float(found["accuracy_bottom_decile"]) == pytest.approx(0.30)
    assert float(found["architecture_cnn1"]) == pytest.approx(0.65)
    row = json.loads(to_json(table))["tables"][0]["rows"][1]
    assert (row["metrics"]["f1"], row["accuracy_per_architecture"]["cnn2"]) == pytest.approx((0.45, 0.8))
    plain, more = to_text(table), to_text(table, metrics=True)
    assert "F1" not in plain
    assert "cnn1" not in plain
    assert ["fedgh", "30.00", "40.00", "45.00"] in [line.split() for line in more.splitlines()]
    assert ["fedgh", "65.00", "80.00"] in [line.split() for line in more.splitlines()]
    assert max(map(len, more.splitlines())) <= 100


def test_many_architectures_wrap_on_the_terminal(make: Any) -> None:
    make("local", **figures(0.3, 0.2, **{f"a-long-name-of-network-{i}": i / 10 for i in range(8)}))
    text = to_text(compare_runs(load_runs(make.root)), metrics=True)
    assert max(map(len, text.splitlines())) <= 100
    assert sum(f"network-{i}" in text for i in range(8)) == 8


def test_one_architecture_needs_no_table_of_its_own_and_old_runs_have_none(make: Any) -> None:
    make("local", **figures(0.3, 0.2, cnn1=0.5))
    assert "by architecture" not in to_markdown(compare_runs(load_runs(make.root)))
    make("old", "fedgh")
    local, old = compare_runs(load_runs(make.root)).sections[0].rows
    assert (old.metrics, old.accuracy_per_architecture, old.accuracy_bottom_decile) == ({}, {}, None)
    markdown = to_markdown(compare_runs(load_runs(make.root)))
    assert "| - | - | - | 2.0 KiB |" in markdown
    alone = to_text(compare_runs(load_runs(make.root / "old")), metrics=True)
    assert "tenth" not in alone
    received = compare_runs(load_runs(make.root / "old"), stage="received").sections[0].rows[0]
    assert received.accuracy_per_architecture == {}
    assert local.accuracy_per_architecture == {"cnn1": 0.5}
