"""A client's rows are taken out of a run folder: of one process, and of a deployment at the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.core.message import State, from_bytes, get_group
from polyfed.deploy.protocol import Envelope, deserialize
from polyfed.deploy.server import serve
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.forgetting import forget
from tests.helpers.nearby import DATA, Nearby, recipe_of
from tests.helpers.refusals import refusal

KEPT = {"features": 36, "keep_sums": True}


def recipe_for(rounds: int) -> Recipe:
    settings: dict[str, Any] = {"training": {"rounds": rounds}, "run": {"checkpoint_every": 1}}
    return recipe_of("closed-form", hyperparameters=KEPT, **settings)


def in_one_process(rounds: int, folder: Path, **options: Any) -> list[Envelope]:
    build_federation(recipe_for(rounds), out=folder / "out", data=DATA).run(**options)
    return []


def deployed(rounds: int, folder: Path, **options: Any) -> list[Envelope]:
    """The jobs that nodes were sent."""
    recipe = recipe_for(rounds)
    wire = Nearby(recipe, folder)
    serve(recipe, wire, out=folder / "out", deadline=5, **options)
    return [envelope for _, envelope in wire.sent if envelope.kind == "train"]


def states(folder: Path) -> list[State]:
    """Of the server, by round."""
    files = sorted((folder / "out" / "checkpoint").glob("round-*/server.safetensors"))
    return [from_bytes(file.read_bytes()) for file in files]


@pytest.mark.parametrize("run", [in_one_process, deployed])
def test_all_checkpoints_and_what_follows_are_without_the_client(
    run: Callable[..., list[Envelope]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(2, tmp_path)
    before = states(tmp_path)
    assert cli.status(["deploy", "forget", str(tmp_path / "out"), "1"]) == 0
    assert capsys.readouterr().out == (
        "the rows of client 1 do not count any more; go on with resume=true, so that all clients know\n"
    )
    method = recipe_for(2).chosen_method
    expected = [method.forget(state, 1) for state in before]
    assert len(expected) == 2
    for found, state in zip(states(tmp_path), expected, strict=True):
        torch.testing.assert_close(found, state, rtol=0, atol=0)
    jobs = run(3, tmp_path, resume=True)
    last = states(tmp_path)[-1]
    solution = get_group(last, "solution")
    torch.testing.assert_close(solution, expected[-1]["solution"], rtol=0, atol=0)
    assert {*get_group(last, "held")} == {"0", "1", "2"}
    if run is deployed:
        sent = [deserialize(envelope.body)[0] for envelope in jobs]
        assert len(sent) == 3
        assert all(torch.equal(get_group(message, "solution")["weight"], solution["weight"]) for message in sent)
        assert all("heard" in message for message in sent)
    assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_forgotten_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    assert "recipe.toml" in refusal(lambda: forget(tmp_path, 0))
    in_one_process(1, tmp_path)
    assert cli.status(["deploy", "forget", str(tmp_path / "out"), "1"]) == 0
    (state,) = states(tmp_path)
    with pytest.raises(ConfigError, match=r"^expected a client whose rows count \(0, 2\), got 1$"):
        forget(tmp_path / "out", 1)
    torch.testing.assert_close(states(tmp_path)[0], state, rtol=0, atol=0)
    (file,) = (tmp_path / "out" / "checkpoint").glob("round-*/server.safetensors")
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^expected a whole checkpoint in .*, got none$"):
        forget(tmp_path / "out", 0)
