"""The comparison table against numbers worked out by hand."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import (
    ComparisonGroup,
    Table,
    to_csv,
    to_markdown,
    to_text,
    write,
)
from polyfed.report.figures import draw
from polyfed.report.grouping import Group
from polyfed.report.html_report import page
from polyfed.report.run_records import load_runs

SEEN = {"local": (0.5, 0.4, 0.6), "fedavg": (0.70, 0.60, 0.80), "fedgh": (0.72, 0.62, 0.82)}  # +0.02 on every seed


def compared(root: Path, **options: Any) -> Table:
    return compare_runs(load_runs(root), **options)


def groups_in(root: Path) -> list[Group]:
    return [section.group for section in compared(root).sections]


def section_of(root: Path, **options: Any) -> ComparisonGroup:
    (section,) = compared(root, **options).sections
    return section


def make_all(make: Any, values: dict[str, tuple[float, ...]], **more: Any) -> None:
    for name, found in values.items():
        for seed, accuracy in enumerate(found):
            make(f"{name}-{seed}", name, seed, (accuracy,), **more)


def test_two_methods_two_seeds(two_by_two: Path) -> None:
    section = section_of(two_by_two)
    local, fedgh = section.rows.to_dict("records")
    assert (local["name"], fedgh["name"]) == ("local", "fedgh")  # Local first, though found last
    assert (local["accuracy"], fedgh["accuracy"]) == pytest.approx((0.52, 0.65))
    assert local["accuracy_std"] == pytest.approx(0.04 / 2**0.5)  # two values d apart: d / sqrt(2)
    assert (fedgh["std_clients"], fedgh["worst_client"]) == pytest.approx((0.1, 0.55))  # of 0.5 and 0.6
    assert fedgh["accuracy_best_by_validation"] == pytest.approx(0.55)
    assert local["accuracy_best_by_validation"] is None
    assert (fedgh["by_stage_personal"], fedgh["by_stage_received"]) == pytest.approx((0.65, 0.45))
    assert fedgh["difference"] == pytest.approx(0.13)  # of 0.60 - 0.50 and 0.70 - 0.54
    assert fedgh["difference_std"] == pytest.approx(0.06 / 2**0.5)
    assert (fedgh["difference_seeds"], local["difference"]) == ([0, 1], None)
    assert [fedgh[key] for key in ("bytes_up", "bytes_down", "seconds")] == [3072, 6144, 4.5]
    assert section.caption == (
        "digits (dirichlet, dirichlet_alpha=0.5), 2 clients, 3 rounds, seeds 0, 1. "
        "Accuracy: stage personal, on each client's own test data, plain mean over clients."
    )


def test_text_shows_the_numbers_and_fits(two_by_two: Path) -> None:
    text = to_text(compared(two_by_two))
    (line,) = [line for line in text.splitlines() if line.startswith("fedgh ")]  # two seeds: no intervals
    assert line.split() == [
        *("fedgh", "65.00", "±", "7.07", "+13.00", "±", "4.24", "10.00", "55.00", "55.00", "45.00"),
        *("3.0", "KiB", "6.0", "KiB", "4.5", "s"),
    ]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [80, 100])
def test_long_names_wrap_and_wide_tables_are_cut(make: Any, width: int) -> None:
    more = {"accuracy_best_by_validation": 0.5, "refused": 3, **figures(0.3, 0.2)}
    for seed in range(3):
        make(f"local-{seed}", seed=seed, **more)
        for epochs in (1, 100):
            hyperparameters = {"header_epochs": epochs, "header_batch": 10 * epochs, "header_lr": 0.01 * epochs}
            make(f"gh-{epochs}-{seed}", "fedgh", seed, hyperparameters=hyperparameters, **more)
    text = to_text(compared(make.root), width)
    assert max(map(len, text.splitlines())) <= width
    assert "(header_epochs=1" in text
    blocks = [block for block in text.split("\n\n") if "---" in block]
    assert len(blocks) > 1
    assert all("\nlocal" in block and "\nfedgh" in block for block in blocks), "the names are in each"
    assert sum(block.count("vs Local") for block in blocks) == sum(block.count("refused") for block in blocks) == 1


def test_intervals(make: Any) -> None:
    values = {"local": (0.9, 0.95, 1.0), "fedavg": (0.5, 0.6, 0.7), "fedgh": (0.7, 0.6, 0.65), "fedin": (0.6, 0.8, 0.7)}
    make_all(make, values, accuracy_best_by_validation=0.5)
    section = section_of(make.root)
    rows = {row["name"]: row for row in section.rows.to_dict("records")}
    t = 4.302652730  # t(0.975, 2)
    assert rows["fedin"]["accuracy_margin"] == pytest.approx(t * 0.1 / 3**0.5)  # s = 0.1
    assert rows["fedin"]["difference"] == pytest.approx(-0.25)  # of -0.3, -0.15 and -0.3
    assert rows["fedin"]["difference_margin"] == pytest.approx(t * 0.05)  # s = 0.15 / sqrt(3)
    text = to_markdown(compared(make.root))
    assert "| fedin | [45.16, 94.84] | [50.00, 50.00] | [-46.51, -3.49] |" in text
    assert "| local | [82.58, 100.00] |" in text  # 107.42 can be no accuracy


def test_bold_is_what_leads_beyond_chance(make: Any) -> None:
    make_all(make, SEEN)
    table = compared(make.root)
    (section,) = table.sections
    assert section.leader == "fedgh"
    assert to_markdown(table).count("**72.00 ± 10.00**") == 1
    assert re.findall(r"<b>([^<]+)</b>", page(table)).count("72.00 ± 10.00") == 1
    assert "*" not in to_text(table)
    assert (
        "bold: the highest accuracy, where the 95 % interval of its difference to each other row, paired by seed, "
        "leaves out zero"
    ) in section.notes


@pytest.mark.parametrize(
    "values",
    [
        {name: found[:2] for name, found in SEEN.items()},
        {**SEEN, "fedin": (0.10, 0.63, 0.83)},  # further behind than the next, and not distinguishable from fedgh
        {**SEEN, "fedhenn": (0.2,)},
        {"fedgh": SEEN["fedgh"]},
    ],
    ids=["two seeds", "not from a row further down", "nor from a seed", "alone"],
)
def test_nothing_is_bold_without_an_interval_that_supports_it(make: Any, values: dict[str, tuple[float, ...]]) -> None:
    make_all(make, values)
    table = compared(make.root)
    (section,) = table.sections
    assert section.leader is None
    assert "**7" not in to_markdown(table)
    assert "bold" not in " ".join(section.notes)


@pytest.mark.parametrize(("accuracy", "leader"), [(0.1, "fedgh"), (0.9, None)])
def test_what_has_learnt_nothing_leads_nowhere(accuracy: float, leader: str | None, make: Any) -> None:
    make_all(make, SEEN)
    for seed in range(3):
        lost = None if seed else "nothing was learnt"
        make(
            f"fedin-{seed}", "fedin", seed, (accuracy,), nothing_learnt=lost, epsilon={"client": 1.5 + seed}, delta=1e-5
        )
    section = section_of(make.root)
    assert section.leader == leader
    assert [row["nothing_learnt"] for row in section.rows.to_dict("records")] == [0, 0, 0, 1]
    assert (section.rows["epsilon_client"][3], section.keys_of("epsilon")) == (3.5, ["client"]), "the largest"
    assert "fedin: nothing was learnt" in section.notes
    assert "fedin (nothing learnt in 1 of 3 runs)" in to_markdown(compared(make.root))


def test_a_target(two_by_two: Path) -> None:
    section = section_of(two_by_two, target=0.585)
    assert list(section.rows["target_accuracy"]) == pytest.approx([0.585, 0.585])
    assert list(section.rows["target_reached"]) == [0, 2]
    assert list(section.rows["target_rounds"]) == [None, 2.5]  # rounds 3 and 2
    (note,) = [note for note in section.notes if note.startswith("target")]
    assert note.startswith("target 58.5 %: first scored round")
    table = compared(two_by_two, target=0.585)
    cells = ["fedgh", "2", "of", "2", "2.5", "±", "0.7", "7.5", "KiB", "3.8", "s"]
    assert cells in [line.split() for line in to_text(table).splitlines()]
    assert {"target_rounds", "target_bytes"} <= set(to_csv(table).splitlines()[0].split(","))
    with pytest.raises(ConfigError, match="target: expected"):
        compared(two_by_two, target=60)


def test_csv_keeps_exact_bytes(make: Any) -> None:
    make("a", "fedgh", 0, bytes_up=1_234_567_890_123_457, label='odd, "name" | x_y')
    make("b", "local", 0, bytes_up=7)
    make("c", "fedavg", 0, bytes_up=10)
    make("d", "fedavg", 1, bytes_up=13)
    table = compared(make.root)
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [line["name"] for line in lines] == ["local", 'odd, "name" | x_y', "fedavg"]
    assert [line["bytes_up"] for line in lines] == ["7", "1234567890123457", "11.5"]
    first = {key: lines[2][key] for key in ("table", "rounds", "test", "seeds", "accuracy_std")}
    assert first == {"table": "1", "rounds": "2", "test": "client", "seeds": "0 1", "accuracy_std": "0.0"}
    assert lines[1]["accuracy_std"] == ""
    assert float(lines[1]["by_stage_received"]) == pytest.approx(0.4)
    assert 'odd, "name" \\| x_y' in to_markdown(table)


def test_different_data_or_rounds_are_different_tables(make: Any) -> None:
    make("a", accuracies=(0.5,))
    make("b", accuracies=(0.5, 0.6))
    make("c", accuracies=(0.5,), data={"dirichlet_alpha": 0.1})
    make("d", accuracies=(0.5,), data={"max_train_per_client": 50, "root": "/elsewhere"})
    make("e", "fedgh", accuracies=(0.5,), data={"root": "/elsewhere"})
    sections = compared(make.root).sections
    assert [len(section.rows) for section in sections] == [2, 1, 1, 1]
    assert [section.caption.split(", seed")[0] for section in sections] == [
        "digits (dirichlet, dirichlet_alpha=0.5), 2 clients, 1 rounds",
        "digits (dirichlet, dirichlet_alpha=0.5), 2 clients, 2 rounds",
        "digits (dirichlet, dirichlet_alpha=0.1), 2 clients, 1 rounds",
        "digits (dirichlet, dirichlet_alpha=0.5, max_train_per_client=50), 2 clients, 1 rounds",
    ]


def test_stages_and_settings_of_their_own_are_named(make: Any) -> None:
    make("a", "local", 0, (0.5,), stages=["personal"], training={"lr": 0.1})
    make("b", "fedavg", 0, (0.75,), stage="received")
    table = compared(make.root)
    (section,) = table.sections
    assert "each method's own stage (personal or received)" in section.caption
    assert section.rows["difference"][1] == 0.25
    assert "fedavg: its stage received is compared with Local's stage personal" in section.notes
    assert "training.lr differs: 0.1 for local; 0.01 for fedavg" in section.notes
    assert [row["stage"] for row in section.rows.to_dict("records")] == ["personal", "received"]
    assert "| stage |" in to_markdown(table)


def test_refusals_and_missing_values(make: Any) -> None:
    make("a", refused=2, accuracy=None, accuracy_by_stage={}, accuracy_per_client=[])
    assert section_of(make.root).rows["refused"][0] == 2
    assert "refused" in to_text(compared(make.root))
    make("b", seed=1, accuracy=float("nan"), accuracy_by_stage={})
    assert "nan" not in (to_text(compared(make.root)) + to_csv(compared(make.root))).lower()


def test_requests_that_cannot_be_met(make: Any, tmp_path: Path) -> None:
    make("a")
    make("b")
    with pytest.raises(ConfigError, match="two runs are 'local' with seed 0"):
        compared(make.root)
    make("c", finished=False)
    with pytest.raises(ConfigError, match="no finished run"):
        compared(make.root / "c")


def test_files_and_unfinished_runs(make: Any, tmp_path: Path) -> None:
    make("a")
    make("b", "fedgh", finished=False)
    table = compared(make.root)
    assert len(table.sections[0].rows) == 1
    files = write(table, tmp_path / "deep" / "out")
    names = ["comparison.md", "comparison.csv", "comparison-clients.csv"]
    assert [file.name for file in files] == names
    texts = [file.read_bytes().decode("utf-8") for file in files[:-1]]
    assert texts == [to_markdown(table), to_csv(table)]
    for text in (to_text(table), texts[0]):
        assert "unfinished" in text
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


def test_other_figures_are_in_every_file_and_on_request_on_the_terminal(make: Any) -> None:
    """Local and two seeds of FedGH, on two architectures."""
    make("local", **figures(0.30, 0.20, cnn1=0.5, cnn2=0.7))
    make("fedgh-0", "fedgh", 0, **figures(0.40, 0.25, cnn1=0.6, cnn2=0.8))
    make("fedgh-1", "fedgh", 1, **figures(0.50, 0.35, cnn1=0.7, cnn2=0.8))
    table = compared(make.root)
    _, fedgh = table.sections[0].rows.to_dict("records")
    assert (fedgh["metric_balanced_accuracy"], fedgh["metric_f1"]) == pytest.approx((0.4, 0.45))
    assert fedgh["bottom_decile"] == pytest.approx(0.30)
    assert (fedgh["by_architecture_cnn1"], fedgh["by_architecture_cnn2"]) == pytest.approx((0.65, 0.8))
    markdown = to_markdown(table)
    assert "| lowest tenth | balanced accuracy | macro F1 | bytes up |" in markdown
    assert "| 30.00 | 40.00 | 45.00 | 2.0 KiB |" in markdown
    assert "AUC" not in markdown
    assert "Accuracy in % by architecture:\n\n| method | cnn1 | cnn2 |" in markdown
    assert "| fedgh | 65.00 | 80.00 |" in markdown
    found = list(csv.DictReader(io.StringIO(to_csv(table))))[1]
    keys = ("metric_f1", "bottom_decile", "by_architecture_cnn1")
    assert [float(found[key]) for key in keys] == pytest.approx([0.45, 0.30, 0.65])
    assert not {"F1", "cnn1"} & set(to_text(table).split())


# simulated time: there where it was recorded, and not a word of it elsewhere -----------------------------------------


def simulate(folder: Path, seconds: float, **result: Any) -> None:
    """Have a run folder's rounds last so many simulated seconds."""
    path = folder / "rounds.jsonl"
    records = [{**json.loads(line), "simulated_seconds": seconds} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = json.loads((folder / "result.json").read_text())
    done |= {"simulated_seconds": seconds * len(records), **result}
    (folder / "result.json").write_text(json.dumps(done))


def test_simulated_time(two_by_two: Path) -> None:
    """FedGH 10 and 30 s a round, Local 400 s."""
    before = compared(two_by_two, target=0.6)
    assert "simulated" not in "".join(show(before) for show in (to_text, to_markdown, to_csv))
    assert [*draw(groups_in(two_by_two), ["curves"])] == ["accuracy-by-round", "accuracy-by-bytes"]
    for seed in (0, 1):
        simulate(two_by_two / f"fedgh-{seed}", (10.0, 30.0)[seed], left_out=[[1], []][seed])
        simulate(two_by_two / f"local-{seed}", 400.0, left_out=[])
    runs = load_runs(two_by_two)
    table = compare_runs(runs, target=0.6)
    local, fedgh = table.sections[0].rows.to_dict("records")
    assert (fedgh["simulated_seconds"], local["simulated_seconds"]) == (60.0, 1200.0)
    assert fedgh["target_simulated_seconds"] == pytest.approx((30 + 60) / 2), "after rounds 3 and 2"
    assert "fedgh: clients 1 are left out" in " ".join(to_text(table).split())
    assert to_markdown(table).count("simulated time") == 2
    assert "target_simulated_seconds" in to_csv(table).splitlines()[0]
    (axes,) = draw(groups_in(two_by_two), ["curves"])["accuracy-by-simulated"].axes
    assert (axes.get_xlabel(), axes.get_xscale()) == ("simulated time [min]", "log"), "twenty times apart"
    minutes = [place for line in axes.lines for place in line.get_xdata()]
    assert [60 * place for place in minutes] == pytest.approx([400.0, 800.0, 1200.0, 20.0, 40.0, 60.0])


@pytest.mark.parametrize("round", ["last", "best"])
def test_tables_and_figures_name_the_round_whose_scores_they_have(make: Any, round: str) -> None:
    about = {"evaluation": {"stage": "personal", "stages": ["personal"], "round": round}, "stages": ["personal"]}
    for name in ("local", "fedgh"):
        make(name, name, **about, best_round=1 if round == "best" else None, confusion=[[2, 1], [0, 3]])
    when = "after the best round by validation" if round == "best" else "after the last round"
    other = {"best": "last round", "last": "best round"}[round]

    captions = [
        " ".join(figure.texts[0].get_text().split()) for figure in draw(groups_in(make.root), ["clients"]).values()
    ]
    said = [section_of(make.root).notes[0], *captions, page(compared(make.root))]
    assert len(said) == 3
    assert all(when in text and other not in text for text in said), said


def test_a_final_round_is_not_called_the_best_one_that_it_began_from(make: Any) -> None:
    records = make("fedrep", "fedrep", best_round=1, final_round=True) / "rounds.jsonl"
    *regular, last = records.read_text().splitlines()
    records.write_text("\n".join([*regular, json.dumps(json.loads(last) | {"final_round": True})]) + "\n")
    notes = section_of(make.root).notes
    assert "fedrep: a final round began from the best round by validation, 1" in notes
    assert not any("figures of the best round" in note for note in notes)
