"""Natural clients keep their names: in errors, results and run folders, where other clients are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from tests.helpers.hospitals import hospitals

ROWS = "".join(f"{x},{(x * 7) % 5},{'ab'[(x // 3) % 2]}\n" for x in range(20))


def clinics(folder: Path, *names: str, **sections: Mapping[str, Any]) -> pf.Recipe:
    """A recipe of a folder with one folder of 20 rows for each name."""
    for name in names:
        (folder / "clinics" / name).mkdir(parents=True, exist_ok=True)
        (folder / "clinics" / name / "train.csv").write_text(f"x,z,label\n{ROWS}")
    settings = hospitals(folder, **sections)
    settings["data"] = {"dataset": "clients:clinics", "root": str(folder), "split": "8:0:2"}
    return pf.Recipe.from_dict(settings)


def test_names_stand_in_result_and_messages(tmp_path: Path) -> None:
    recipe = clinics(tmp_path, "north", "south\u202ewest")
    federation = build_federation(recipe)
    assert [client.title for client in federation.clients] == ["client 0 ('north')", "client 1 ('south\\u202ewest')"]
    assert federation.clients[0].title_with_network == "client 0 ('north', 'mlp-64-32')"
    run = pf.run(recipe, out=tmp_path / "run")
    assert run.result["client_names"] == ["north", "south\\u202ewest"]
    assert [row["test_samples"] for row in run.result["clients_table"]] == [4, 4]
    held_out = build_federation(clinics(tmp_path, "north", evaluation={"held_out": ["north"]}))
    assert held_out.remarks()[0] == "held out of training: clients 0 ('north')"


@pytest.mark.parametrize(
    ("names", "said"), [(("0", "1", "2"), "'2' has come"), (("east", "0", "new", "1"), "'east' and 1 more have come")]
)
def test_a_run_goes_on_with_its_own_clients_only(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    """A further folder would renumber those behind it: the run is left as it is, finished or not."""
    before = pf.run(clinics(tmp_path, "0", "1"), out=tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    more = clinics(tmp_path, *names)
    for rounds in (1, 3):
        longer = more.model_copy(update={"training": more.training.model_copy(update={"rounds": rounds})})
        with pytest.raises(ConfigError, match=f"run of other clients than the data have now: {said}"):
            pf.run(longer, out=tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=f"no longer have the clients of the run: {said}"):
        build_federation(pf.Recipe.of_run(tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"run of other clients than the data have now: {said}"):
        RunFolder(tmp_path / "run").check_clients(names)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    assert before.result["clients"] == 2
