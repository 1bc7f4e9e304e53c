"""What befalls runs of days: lost bits, a full disk, folders that nobody may write to, clocks, memory, kills."""

from __future__ import annotations

import random
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch

from polyfed.core.settings import Training
from polyfed.engine import checkpoint
from polyfed.engine.federation import Federation
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError, RunError
from polyfed.methods import FedGH
from polyfed.plugins.settings import Devices
from polyfed.records.read import parse_json, parse_toml, seal, unseal
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records
from tests.helpers.quick import others_slow

FOUR = Training(rounds=4, batch_size=8, lr=0.1, client_fraction=0.67)
BUFFERED = Devices(profiles=["laptop", "phone-low"], buffer_size=2)  # some work is under way between rounds

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")


def made(out: Path | None, method: FedGH | None = None, **options: Any) -> Federation:
    """Four rounds of FedGH, a checkpoint after each, work under way."""
    method = method or FedGH()
    return ConformanceKit(method=FedGH()).usual.federation(
        method, FOUR, out=out, checkpoint_every=1, devices=BUFFERED, **options
    )


@pytest.fixture(scope="module")
def straight() -> Federation:
    """The run that nothing befalls."""
    done = made(None)
    done.run()
    return done


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of rounds 3 and 4, without a result."""
    out = tmp_path_factory.mktemp("endurance") / "run"
    made(out).run()
    (out / "result.json").unlink()
    return out


def flips(data: bytes, r: random.Random, count: int) -> Iterator[bytes]:
    """The bytes with one bit changed, or cut short."""
    for number in range(count):
        if number % 4 == 3:
            yield data[: r.randrange(len(data))]
            continue
        place, out = r.randrange(len(data)), bytearray(data)
        out[place] ^= 1 << r.randrange(8)
        yield bytes(out)


# lost bits --------------------------------------------------------------------------------------------------------


def found(folder: Path) -> tuple[int | None, list[str]]:
    """The round of the checkpoint that is used, and what is said; None: none is whole."""
    run = RunFolder(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            used = checkpoint.newest(run.checkpoints, run.records)
        except ConfigError:
            used = None
    return None if used is None else int(used.name[-1]), [str(one.message) for one in said]


def damage_is_seen(folder: Path, count: int) -> None:
    """Every flip or cut of a file of the newest checkpoint leads to the one before it, and is said."""
    assert found(folder) == (4, [])
    r = random.Random(0)
    names = sorted(path.name for path in (folder / "checkpoint" / "round-000004").iterdir())
    assert names == ["index.json", "states.safetensors"]
    for name in names:
        path = folder / "checkpoint" / "round-000004" / name
        whole = path.read_bytes()
        for broken in flips(whole, r, count):
            path.write_bytes(broken)
            used, said = found(folder)
            assert used == 3, name
            assert [line.count("damaged") for line in said] == [1]
        path.write_bytes(whole)


def test_a_flipped_bit_or_a_cut_leads_to_the_checkpoint_before(unfinished: Path, tmp_path: Path) -> None:
    damage_is_seen(Path(shutil.copytree(unfinished, tmp_path / "run")), 12)


def test_with_all_checkpoints_damaged_nothing_is_touched(unfinished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(unfinished, tmp_path / "run"))
    for number, name in ((3, "index.json"), (4, "states.safetensors")):
        path = out / "checkpoint" / f"round-{number:06d}" / name
        path.write_bytes(path.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(ConfigError, match=r"all 2 are damaged; start again with --overwrite"),
    ):
        made(out).run(resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("line", others_slow([4, 2], quick=[2]))
def test_a_damaged_record_is_seen_and_an_earlier_checkpoint_may_do(
    line: int, unfinished: Path, tmp_path: Path, straight: Federation
) -> None:
    out, r = Path(shutil.copytree(unfinished, tmp_path / "run")), random.Random(line)
    path = out / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for broken in flips(lines[line - 1][:-1], r, 60):
        path.write_bytes(b"".join([*lines[: line - 1], broken + b"\n", *lines[line:]]))
        used, _ = found(out)
        assert used == (3 if line == 4 else None)
    again = made(out)
    if line == 2:
        with pytest.warns(UserWarning, match="line 2, is damaged"), pytest.raises(ConfigError, match="damaged"):
            again.run(resume=True)
        return
    with pytest.warns(UserWarning, match="line 4, is damaged"):
        again.run(resume=True)
    assert difference(all_state(straight), all_state(again)) is None
    assert records(straight) == records(again)


@pytest.mark.parametrize(("key", "value"), [("final_round", []), ("stopped_after", "2"), ("rounds", 2.5)])
def test_a_result_of_another_shape_is_not_resumed(unfinished: Path, tmp_path: Path, key: str, value: object) -> None:
    out = Path(shutil.copytree(unfinished, tmp_path / "run"))
    made(out).run(resume=True)
    result = unseal((out / "result.json").read_bytes())
    (out / "result.json").write_bytes(seal({**result, key: value}))
    with pytest.raises(ConfigError, match=rf"expected a run's result in .*result\.json, got something else: .*{key}"):
        made(out).run(resume=True)


def test_a_seal_is_of_all_bytes_and_shapes_are_told() -> None:
    text = seal({"round": 1, "x": [1.5, None, "é"]})
    assert unseal(text) == {"round": 1, "x": [1.5, None, "é"]}
    for place in range(len(text)):
        broken = bytearray(text)
        broken[place] ^= 1
        with pytest.raises(ValueError, match=r"seal|UTF|codec|expected|JSON|Expecting|Invalid|Unterminated|Extra"):
            unseal(bytes(broken))
    assert unseal(b'{"round": 1}', needed=False) == {"round": 1}
    with pytest.raises(ValueError, match="nested too deep"):
        parse_toml(b"a = " + b"[" * 200000)
    with pytest.raises(ValueError, match="half a character"):
        parse_json(b'"\\ud83d"')


# the machine ------------------------------------------------------------------------------------------------------


def same_after_resuming(out: Path, straight: Federation) -> None:
    assert not list(out.rglob(".*.tmp"))
    again = made(out)
    again.run(resume=True)
    assert difference(all_state(straight), all_state(again)) is None
    assert records(straight) == records(again)


@pytest.mark.parametrize("call", [2, *(pytest.param(call, marks=pytest.mark.slow) for call in (1, 3))])
def test_no_space_left_while_a_checkpoint_is_written(
    call: int, tmp_path: Path, straight: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = safetensors.torch.save_file, 0

    def full(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise safetensors.SafetensorError("No space left on device")
        whole(*given)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match="No space left on device; whole rounds are kept"):
        made(tmp_path / "run").run()
    monkeypatch.undo()
    same_after_resuming(tmp_path / "run", straight)


class _Hungry(FedGH):
    """Memory runs out in round 3, at client 0's."""

    def loss(self, model: Any, batch: Any, context: Any) -> Any:
        raise MemoryError


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=needs_linux)])
def test_memory_that_runs_out_is_one_line(executor: str, tmp_path: Path) -> None:
    workers = 2 if executor == "processes" else None
    with pytest.raises(RunError, match=r"client \d \(.*\), round 1, training: memory ran out") as error:
        made(tmp_path / "run", _Hungry(), executor=executor, workers=workers).run()
    assert "\n" not in str(error.value)
