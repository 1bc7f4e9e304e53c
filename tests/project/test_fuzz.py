"""The fuzzer of scripts/fuzz.py: it sees every kind of fault, and finds none; what it found before stays mended."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import pickle
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from polyfed.config.recipe import Recipe
from polyfed.core.message import from_bytes
from polyfed.data import cache, parquet_images
from polyfed.data.datasets import from_tensors, load_dataset
from polyfed.data.inference_inputs import InputSpec, read
from polyfed.deploy.answer_ledger import AnswerLedger
from polyfed.deploy.protocol import Envelope, deserialize, serialize
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError, PolyfedError, RunError
from polyfed.experiments.prediction import load_model, predict
from polyfed.experiments.privacy_report import privacy_costs
from polyfed.methods import FedGH
from polyfed.models.zoo import build
from polyfed.report.sensitivity import read_sweep
from polyfed.results.read import seal, unseal

FUZZ = SimpleNamespace(**runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "fuzz.py")))
QUICK = ("recipe-values", "message", "envelope", "npz")


def fuzzed(name: str, count: int) -> None:
    FUZZ.prepare_inputs(name)
    found = FUZZ.in_children(name, 0, count, None, 60.0)
    assert found["failures"] == {}
    assert found["inputs"] == count
    assert sum(found["ends"].values()) == count * len(FUZZ.TARGETS[name].use)


@pytest.mark.parametrize("name", QUICK)
def test_some_inputs_of_each_kind(name: str) -> None:
    fuzzed(name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZ.TARGETS)
def test_many_inputs_of_each_kind(name: str) -> None:
    fuzzed(name, 300)


class _Poison:
    """Unpickled, it would call a function."""

    def __reduce__(self) -> Any:
        return os.getpid, ()


def _unpickles(place: Path) -> None:
    pickle.loads(pickle.dumps(_Poison()))


def _never_ends(place: Path) -> None:
    time.sleep(5)


def _says_two_lines(place: Path) -> None:
    class Long(PolyfedError):
        def __str__(self) -> str:
            return "one\ntwo"

    raise Long


def _crashes(_: Path) -> None:
    faulthandler.disable()  # pytest's would write the whole stack into the log of a test that passes
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda place: {}["x"], "KeyError"),
        (lambda place: (place.parent / "outside").write_text("x"), "open("),
        (lambda place: (place.parent / "beside" / "mine.txt").unlink(), "os.remove("),
        (lambda place: os.mkdir(place / ".." / "new"), "os.mkdir("),
        (lambda place: os.system("true"), "os.system"),
        (_unpickles, "pickle.find_class"),
        (_never_ends, "no end within"),
        (_says_two_lines, "not one clear line"),
        (_crashes, "the process ended with status -11"),
    ],
    ids=["KeyError", "open", "remove", "mkdir", "system", "unpickle", "hang", "lines", "crash"],
)
def test_every_kind_of_fault_is_seen(use: Callable[[Path], object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = FUZZ.Target("", lambda r: {"file": b"x"}, [use])
    monkeypatch.setitem(FUZZ.TARGETS, "guilty", guilty)
    limit = 0.1 if use is _never_ends else 300.0  # seconds; a busy machine must not look like one that hangs
    found = FUZZ.in_children("guilty", 0, 2, None, limit)
    assert any(says in text for text in found["failures"]), found
    assert found["inputs"] == 2


# what it found ------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line_however_long_what_it_quotes() -> None:
    assert str(ConfigError("a\nb\u2028c  d")) == "a b c d"
    assert len(str(RunError("x" * 5000))) == 1000
    head = b'{"' + b"9" * 5000 + b'":"x"}'
    with pytest.raises(ConfigError) as error:
        from_bytes(len(head).to_bytes(8, "little") + head)
    assert len(str(error.value)) <= 1000


def test_a_tensor_of_a_shape_that_is_none() -> None:
    head = b'{"x":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}'
    with pytest.raises(ConfigError, match="expected a message as safetensors"):
        from_bytes(len(head).to_bytes(8, "little") + head)


def with_empty_groups(names: bytes) -> bytes:
    """The envelope of one tensor whose header calls its empty groups as given."""
    body = serialize({"x": torch.ones(1)})
    end = 8 + int.from_bytes(body[:8], "little")
    head = body[8:end].replace(b'"empty": []', b'"empty": ' + names)
    assert head != body[8:end]
    return len(head).to_bytes(8, "little") + head + body[end:]


@pytest.mark.parametrize(("odd", "name"), [(b"[5.5]", "5.5"), (b"[null]", "None")])
def test_a_name_that_is_no_text_is_read_as_text(odd: bytes, name: str) -> None:
    message, _ = deserialize(with_empty_groups(odd))
    assert message == {"x": torch.ones(1), name: {}}
    assert deserialize(serialize(message))[0] == message


def test_a_name_with_a_slash_is_refused() -> None:
    with pytest.raises(RunError, match="expected message names without '/', got 'a/b'"):
        deserialize(with_empty_groups(b'["a/b", 3]'))


def npy(shape: str, kind: str = "<f4") -> bytes:
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"\0" * 40


@pytest.mark.parametrize("shape", ["(1099511627776, 1048576)", "((2, 5)", "(" * 300, "(2, 5'", "(-1,)"])
def test_headers_of_arrays_that_are_none(shape: str, tmp_path: Path) -> None:
    members = {"x.npy": npy(shape), "y.npy": npy("(5,)", "<i8")}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.npz").write_bytes(FUZZ.archive(members))
    (tmp_path / "new.npy").write_bytes(npy(shape))
    with pytest.raises(ConfigError, match="expected arrays x and y"):
        load_dataset(f"npz:{tmp_path}")
    with pytest.raises(ConfigError, match="expected an array of numbers"):
        read(tmp_path / "new.npy", InputSpec((2,), torch.float32, None, ("a", "b")))


def test_inputs_without_numbers_and_of_any_number_of_channels(tmp_path: Path) -> None:
    members = {"x.npy": npy("(5, 1099511627776, 4, 0)"), "y.npy": npy("(5,)", "<i8")}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.npz").write_bytes(FUZZ.archive(members))
    with pytest.raises(ConfigError, match=r"expected inputs of one number or more in .*, got the shape"):
        load_dataset(f"npz:{tmp_path}")


def test_new_inputs_that_begin_like_an_archive(tmp_path: Path) -> None:
    (tmp_path / "new.npy").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    with pytest.raises(ConfigError, match="expected an array of numbers"):
        read(tmp_path / "new.npy", InputSpec((2,), torch.float32, None, ("a", "b")))


@pytest.mark.parametrize(("kind", "odd"), [("texts", {"vocabulary": 2**24}), ("noise", {"feature_dim": 2**24})])
def test_a_model_larger_than_its_weights(kind: str, odd: dict[str, int], tmp_path: Path) -> None:
    place = laid(FUZZ.run_folder(kind), tmp_path)
    change_index(place, odd)
    with pytest.raises(ConfigError, match=r"expected weights of 16777216 .* got a file of \d+ bytes"):
        load_model(place, 0)


def test_a_recipe_without_end(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_bytes(b"[data]\nname = " + b"[" * 100000)
    with pytest.raises(ConfigError, match=r"expected TOML in .*: nested too deep"):
        Recipe.load(tmp_path / "deep.toml")


def test_a_list_without_end_beside_arrays(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", x=np.zeros((2, 3), np.float32), y=np.array([0, 1]))
    (tmp_path / "config.json").write_bytes(b"[" * 100000)
    with pytest.raises(ConfigError, match=r"expected a JSON object in .*config\.json"):
        load_dataset(f"npz:{tmp_path}")


def test_a_network_for_which_there_is_no_memory() -> None:
    with pytest.raises(ConfigError, match="expected a feature_dim for which there is memory, got 1099511627776"):
        build("digits-cnn1", (1, 8, 8), 10, 2**40)


def test_images_for_which_there_is_no_memory() -> None:
    for shape in ((2**60, 1, 2**10, 2**10), (2**55, 1, 8, 8)):
        with pytest.raises(ConfigError, match="expected images for which there is memory, got"):
            parquet_images.allocate(shape, Path("x.parquet"))


def test_a_label_of_which_there_are_no_so_many_classes(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "0.npz", x=np.zeros((2, 3), np.float32), y=np.array([0, 2**60]))
    with pytest.raises(ConfigError, match=r"expected labels below 1000000 in .*, got 1152921504606846976"):
        load_dataset(f"npz:{tmp_path}")
    with pytest.raises(ConfigError, match="expected labels below 1000000 in 'mine'"):
        from_tensors((torch.zeros(2, 3), torch.tensor([0, 2**60])), name="mine")


def test_more_rows_of_images_than_a_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a Parquet file may hold more rows than its end tells."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(FUZZ.parquets()[0])
    whole = parquet_images.open_parquet

    def short(path: Path) -> Any:
        found = whole(path)
        return SimpleNamespace(
            metadata=SimpleNamespace(num_rows=found.metadata.num_rows - 1),
            schema_arrow=found.schema_arrow,
            iter_batches=found.iter_batches,
        )

    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parquet_images, "open_parquet", short)
    with pytest.raises(ConfigError, match="expected 5 rows, as the files say, got more from"):
        load_dataset("set", tmp_path)


# what an alteration of structure found -----------------------------------------------------------------------------


def laid(files: dict[str, bytes], place: Path) -> Path:
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


def change_rounds(place: Path, change: Callable[[list[Any]], object]) -> None:
    """With seals that fit: whoever writes a folder writes the seals, too."""
    path = place / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        del line["seal"]
    change(lines)
    path.write_bytes(b"".join(seal(line) + b"\n" for line in lines))


def change_index(place: Path, odd: dict[str, Any]) -> None:
    """Of every model; with a checksum that fits."""
    path = place / "models" / "index.json"
    index = json.loads(path.read_bytes())
    for entry in index.values():
        entry.update(odd)
    path.write_text(json.dumps(index))
    path.with_name("index.json.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


RELEASE = {
    **{"what": "upload", "unit": "client", "noise": 2.0, "drawn": 0, "held": 0},
    **{"poisson": False, "times": 1, "clients": [0, 1]},
}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"releases": 5}, "'releases': expected a list"),
        ({"releases": [5]}, r"'releases\[0\]': expected an object"),
        ({"releases": [{k: v for k, v in RELEASE.items() if k != "unit"}]}, "expected the key 'unit', got none"),
        ({"releases": [{**RELEASE, "unit": "row"}]}, "expected one of client, sample"),
        ({"releases": [{**RELEASE, "noise": 0}]}, "'releases\\[0\\].noise': expected a number from"),
        ({"releases": [{**RELEASE, "times": "x"}]}, "'releases\\[0\\].times': expected a whole number"),
        ({"releases": [{**RELEASE, "clients": [[]]}]}, "expected a whole number"),
        ({"epsilon": 5}, "'epsilon': expected an object"),
        ({"epsilon": {"client": "x"}}, "'epsilon.client': expected a number"),
        ({"epsilon": {"row": 1.0}}, "'epsilon': expected one of client, sample, got 'row'"),
    ],
)
def test_an_account_of_noise_that_is_none(told: dict[str, Any], says: str, tmp_path: Path) -> None:
    place = laid(FUZZ.run_folder("noise"), tmp_path)
    change_rounds(place, lambda lines: [line.update(told) for line in lines])
    for reader in (lambda: privacy_costs([place]), lambda: RunFolder(place).records()):
        with pytest.raises(ConfigError, match=says):
            reader()


def test_a_release_about_no_rows(tmp_path: Path) -> None:
    place = laid(FUZZ.run_folder("samples"), tmp_path)
    odd = {"drawn": 0, "held": 5, "poisson": False}
    change_rounds(place, lambda lines: [release.update(odd) for line in lines for release in line["releases"]])
    with pytest.raises(ConfigError, match="expected releases about one row or more, got one about 0 of 5"):
        privacy_costs([place])


def test_a_delta_that_is_none(tmp_path: Path) -> None:
    place = laid(FUZZ.run_folder("noise"), tmp_path)
    result = unseal((place / "result.json").read_bytes())
    for delta in (0, 2.0, "x", None):
        (place / "result.json").write_bytes(seal({**result, "delta": delta}))
        with pytest.raises(ConfigError, match="'delta': expected"):
            privacy_costs([place])


@pytest.mark.parametrize(
    "odd",
    [
        {"image_size": 2**24},
        {"image_size": [8]},
        {"image_size": "8"},
        {"prepare": {"mean": ["a"], "std": [1.0]}},
        {"prepare": {"mean": "a", "std": [1.0]}},
        {"prepare": {"mean": [[0.5]], "std": [1.0]}},
        {"prepare": 5},
    ],
    ids=str,
)
def test_a_model_whose_inputs_are_none(odd: dict[str, Any], tmp_path: Path) -> None:
    place = laid(FUZZ.run_folder(), tmp_path)
    change_index(place, odd)
    with pytest.raises(ConfigError, match="as this version writes it, got another"):
        predict(place, 0, np.zeros((1, 1, 8, 8), np.uint8))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(keys=[1.5, "training.lr"]),
        lambda table: table.update(rows=[]),
        lambda table: table.update(caption=7),
        lambda table: table.update(notes=[{}]),
        lambda table: table["rows"][-1]["settings"].pop("training.lr"),
        lambda table: table["rows"][-1]["settings"].update({"training.lr": {"x": 1}}),
        lambda table: table["rows"][-1].update(accuracy="x"),
        lambda table: table["rows"][-1].update(seconds={}),
        lambda table: table["rows"][-1].update(words=[5]),
        lambda table: table["rows"][-1].update(runs=[[]]),
        lambda table: table["rows"][-1].update(method=5),
    ],
)
def test_a_table_of_a_sweep_that_is_none(change: Callable[[Any], object], swept: bytes, tmp_path: Path) -> None:
    table = json.loads(swept)
    assert table["rows"][-1]["words"]
    change(table)
    (tmp_path / "sweep.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"expected .*sweep\.json as `polyfed sweep` writes it, got another"):
        read_sweep(tmp_path)


@pytest.fixture(scope="module")
def swept() -> bytes:
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda *arguments, **options: None)
        found: bytes = FUZZ.sweep_folder()["sweep.json"]
    return found


def test_a_count_of_answers_without_end(tmp_path: Path) -> None:
    (tmp_path / "answered.jsonl").write_bytes(b"[" * 100000 + b"\n")
    with pytest.raises(RunError, match="expected a kind and a request in each line"):
        AnswerLedger(tmp_path / "answered.jsonl").count("training", "x", 1)


@pytest.mark.parametrize(
    "odd",
    [
        {"architecture": "digits-cnn2"},
        {"architecture": None},
        {"classes": 2**40},
        {"feature_dim": 7},
        {"input": {"shape": [1, 2**20, 8], "type": "uint8"}},
        {"prepare": {"mean": 1}},
        {"class_names": 5},
        {"class_names": ["a"] * 10},
        {"method": "os:system"},
        {"hyperparameters": {"header_lr": "x:y"}},
        {"auxiliary_model": "antigravity:net"},
        {"round": None},
    ],
    ids=str,
)
def test_a_node_is_told_of_another_model_than_its_own(odd: dict[str, Any], tmp_path: Path) -> None:
    """It writes what the server says of the model beside it, and makes the lines that load it."""
    sent, files = FUZZ.correspondence()
    laid({name: data for name, data in files.items() if "answered" not in name}, tmp_path)
    kind, facts, body = next(letter for letter in sent if letter[0] == "finish")
    asked = {**facts, "about": {**facts["about"], **odd}}
    with pytest.raises(RunError, match="expected the entry of this client's model, got another"):
        FUZZ.answered(tmp_path, 0, Envelope(kind, asked, body))
    said = {**facts["about"], "modules": ["/anywhere"], "vectors": "```\n/etc/passwd"}
    FUZZ.answered(tmp_path, 0, Envelope(kind, {**facts, "about": said}, body))
    (index,) = tmp_path.glob("node-0/*/models/index.json")
    (entry,) = json.loads(index.read_text()).values()
    assert "modules" not in entry
    assert entry["vectors"] is None, "what names code or files is the node's own"


def lacks(key: str) -> Callable[[list[Any]], object]:
    return lambda lines: [line.pop(key) for line in lines]


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        *(
            ("plain", lacks(key), f"expected the key '{key}', got none")
            for key in ("validation", "seconds", "samples", "bytes_by_client", "accuracy")
        ),
        (
            "plain",
            lambda lines: [line["bytes_by_client"].update({"7": {"up": 1, "down": 1}}) for line in lines],
            "the records tell of a client '7', who is not in the run",
        ),
        ("noise", lambda lines: lines[0].pop("releases"), "'releases'"),  # what it cost in privacy, and not for what
    ],
)
def test_a_run_does_not_go_on_from_odd_records(
    kind: str, change: Callable[[list[Any]], object], told: str, tmp_path: Path
) -> None:
    place = laid({name: data for name, data in FUZZ.run_folder(kind).items() if name != "result.json"}, tmp_path)
    change_rounds(place, change)
    with pytest.warns(UserWarning, match=told), pytest.raises(ConfigError, match="damaged"):
        FUZZ.federation(place, kind).run(resume=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, facts: tensors.update(train_y=tensors["train_y"] + 2**40),
        lambda tensors, facts: tensors.update(train_x=tensors["train_x"].float()),
        lambda tensors, facts: tensors.update(train_x=tensors["train_x"][:, :0]),
        lambda tensors, facts: tensors.update(train_x=tensors["train_x"].bfloat16()),
        lambda tensors, facts: tensors.pop("train_y"),
        lambda tensors, facts: facts.pop("class_names"),
        lambda tensors, facts: facts.update(class_names="[" * 100000),
        lambda tensors, facts: facts.update(class_names='"ab"'),
    ],
)
def test_a_decoded_copy_that_is_none_is_made_anew(
    change: Callable[[Any, Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checksum that fits, where there can be one."""
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    laid({"set/train.parquet": FUZZ.parquets()[1]}, tmp_path)
    whole = load_dataset("set", tmp_path)
    (path,) = (tmp_path / "cache").rglob("*.safetensors")
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as stored:
        facts = dict(stored.metadata())
    change(tensors, facts)
    if tensors["train_x"].dtype != torch.bfloat16:
        facts["checksum"] = cache.compute_checksum(tensors, facts)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=facts)
    again = load_dataset("set", tmp_path)
    assert torch.equal(again.train.x, whole.train.x)
    assert torch.equal(again.train.y, whole.train.y)
    assert again.class_names == whole.class_names


def test_a_count_of_bytes_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with another server in it has messages that the method's own count does not know."""

    def counted(*_: object) -> int:
        raise KeyError("bias")

    monkeypatch.setattr(FedGH, "nbytes_in_paper", counted)
    with pytest.raises(RunError, match="server, round 1, nbytes_in_paper: KeyError: 'bias'"):
        FUZZ.federation(tmp_path / "run").run()
