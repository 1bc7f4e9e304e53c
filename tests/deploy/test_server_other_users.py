"""Of a deployment's server and nodes other users of their machines get nothing; tried as user nobody."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from polyfed.deploy.node import Node
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.server import serve
from polyfed.deploy.superlink import serve_nodes
from polyfed.deploy.tls import make_node_key, make_server_certificate
from polyfed.errors import ConfigError
from tests.helpers.nearby import Nearby, recipe_of
from tests.helpers.other_users import NOBODY, needs_root, open_to_nobody, shared_folder
from tests.helpers.quick import others_slow


@needs_root
@pytest.mark.parametrize("old", others_slow([False, True], quick=[True]))
def test_run_folder_and_state_dirs_are_closed(old: bool) -> None:
    """Weights, the nodes' facts, secrets; also where an older version has left the folders open."""
    recipe = recipe_of("fedgh", privacy={"upload_clip_norm": 1.0, "upload_noise_multiplier": 0.1})
    with shared_folder() as shared:
        out = shared / "run"
        folders = [out, *(shared / f"node-{number}" for number in range(3))]
        if old:
            for folder in folders:
                folder.mkdir(mode=0o755)
        wire = Nearby(recipe, shared, configs={k: {"share-model": True, "secret-noise": True} for k in range(3)})
        serve(recipe, wire, out=out, deadline=5)
        names = {path.name for folder in folders for path in folder.rglob("*")}
        assert {"nodes.jsonl", "result.json", "personal-000.safetensors", "noise.secret", "number.secret"} <= names
        assert open_to_nobody(*folders, *(path for folder in folders for path in folder.rglob("*"))) == []
        out.chmod(0o755)
        serve(recipe, wire, out=out, deadline=5, resume=True)
        assert open_to_nobody(out) == []


def test_a_state_dir_that_others_have_filled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.secret").write_bytes(bytes(32))
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="expected a folder into which only its user can write"):
        Node(recipe_of(), NodeConfig(**{"client-id": 0, "state-dir": str(tmp_path)}))


@needs_root
def test_keys_are_closed() -> None:
    with shared_folder() as shared:
        make_server_certificate(shared / "keys", ["localhost"])
        make_node_key(shared / "keys" / "node")
        found = open_to_nobody(shared / "keys")
        assert [Path(path).name for path in sorted(found)] == ["keys", "ca.crt", "node.pub", "server.pem"]


@needs_root
@pytest.mark.parametrize("old", others_slow([False, True], quick=[False]))
def test_the_servers_database_is_closed(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what nodes send: clients' weights."""
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    import uvicorn

    monkeypatch.setenv("PATH", "")  # both are put back: the server changes them
    monkeypatch.setattr(sys, "argv", [])
    with shared_folder() as shared:
        make_server_certificate(shared / "keys", ["localhost"])
        files = [shared / f"superlink.db{ending}" for ending in ("", "-wal", "-shm")]
        if old:
            for file in files:
                file.touch()
            assert len(open_to_nobody(*files)) == 3
        monkeypatch.setattr(uvicorn, "run", lambda *_, **__: files[1].touch())
        serve_nodes(shared / "keys", database=files[0])
        assert all(file.exists() for file in files[:2])
        assert open_to_nobody(*files) == []
        os.chown(files[1], NOBODY, NOBODY)
        with pytest.raises(ConfigError, match=r"expected a database of this user's own, got .*-wal, which belongs to"):
            serve_nodes(shared / "keys", database=files[0])
