"""`polyfed deploy init`: a folder that Flower takes, whose commands are ours and Flower's, and nothing overwritten."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.deploy.app_template import create_app
from polyfed.deploy.flower_transport import RunConfig
from polyfed.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
FILES = ["Dockerfile", "README.md", "config.toml", "federated_app.py", "pyproject.toml", "recipe.toml"]
NAME = "my-2nd-federation"  # what Flower calls the app
FILES += ["nginx.conf", "superlink.service", "supernode.service", ".gitignore"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apps") / "my 2nd_federation"
    options = {"method": "fedhenn", "seed": 3, "overrides": ["training.rounds=3", 'data.split="6:1:3"']}
    create_app(folder, QUICKSTART, host="fl.example.org", **options)
    return folder


def shell_commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.strip()]


def test_all_files_are_there_and_filled(app: Path) -> None:
    assert sorted(path.name for path in app.iterdir()) == sorted(FILES)
    for path in app.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\$(name|host|method|clients|last|version|authority)\b", text), path
    asked = Recipe.load(app / "recipe.toml")
    assert (asked.training.rounds, asked.data.split, asked.method.name, asked.run.seed) == (3, "6:1:3", "fedhenn", 3)


def test_flowers_part_of_pyproject(app: Path) -> None:
    project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dependencies"] == [], "a SuperLink would install them anew for every run"
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,31}", project["project"]["name"])
    told = project["tool"]["flwr"]["app"]
    assert told["config"].keys() == RunConfig().model_dump(by_alias=True).keys(), (
        "Flower lets a run change what is listed, and nothing else"
    )
    names = {
        node.targets[0].id
        for node in ast.parse((app / "federated_app.py").read_text()).body
        if type(node) is ast.Assign
    }  # type: ignore[attr-defined]
    for reference in told["components"].values():
        module, _, name = reference.partition(":")
        assert (app / f"{module}.py").exists()
        assert name in names


def test_nobody_but_nodes_comes_in_from_elsewhere(app: Path) -> None:
    """The server listens on 127.0.0.1 in all examples; the proxy has one way to it."""
    for path in app.iterdir():
        assert "0.0.0.0" not in path.read_text(encoding="utf-8"), path
        assert "--host 127.0.0.1" not in path.read_text(encoding="utf-8"), "it is the default"
        assert "8000:" not in path.read_text(encoding="utf-8"), path
    site = (app / "nginx.conf").read_text(encoding="utf-8")
    assert f"/srv/{NAME}/keys/" in site
    assert re.findall(r"location (\S+) \{\s+(.+)", site) == [
        ("/", "return 403;"),
        ("/v1/fleet/", "limit_except POST {"),
    ]
    assert re.findall(r"proxy_pass (.+);", site) == ["https://127.0.0.1:8000"]


def test_every_polyfed_command_of_the_readme_is_one(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="the extra 'flower' is not installed")
    commands = shell_commands((app / "README.md").read_text(encoding="utf-8"))
    ours = [words[1:] for words in commands if words[0] == "polyfed"]
    assert [words[1] for words in ours] == ["certify", "server", "key", "node"]
    monkeypatch.chdir(app)
    try:
        asked: list[dict[str, object]] = []
        monkeypatch.setattr(
            "polyfed.deploy.superlink.serve_nodes", lambda keys, **more: asked.append({"keys": keys, **more})
        )
        monkeypatch.setattr(
            "polyfed.deploy.supernode.join", lambda *given, **more: asked.append({"given": given, **more})
        )
        for words in ours:
            assert cli.status(words) == 0
        assert asked[0] == {"keys": Path("keys"), "host": "127.0.0.1", "port": 8000, "database": Path("superlink.db")}
        recipe, config = asked[1].pop("given")  # type: ignore[misc]
        assert (recipe.name, recipe.run.seed, recipe.training.rounds) == ("fedhenn", 3, 3)
        assert config == 'client-id=0 state-dir="state"'
        files = {"authority": Path("keys/ca.crt"), "key": Path("keys/node")}
        assert asked[1] == {"server": "fl.example.org:443", **files}
        assert {path.name for path in (app / "keys").glob("node*")} == {"node", "node.pub"}
    finally:
        shutil.rmtree(app / "keys", ignore_errors=True)


@pytest.mark.slow
def test_flower_bundles_the_app_and_nothing_private(app: Path, tmp_path: Path) -> None:
    build = pytest.importorskip("flwr.cli.build", reason="the extra 'flower' is not installed")
    config = pytest.importorskip("flwr.cli.config_utils", reason="another flwr")
    copy = tmp_path / "federation"
    shutil.copytree(app, copy)
    for secret in ("keys/node", "keys/ca.key", "runs/x/result.json", "state/x/facts.json"):
        (copy / secret).parent.mkdir(parents=True, exist_ok=True)
        (copy / secret).write_text("{}")
    config.load_and_validate(copy / "pyproject.toml")
    (tmp_path / "app.zip").write_bytes(build.build_fab_from_disk(copy))
    shutil.unpack_archive(tmp_path / "app.zip", tmp_path / "out")
    held = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"pyproject.toml", "federated_app.py", "recipe.toml"} <= held
    assert not [name for name in held if name.startswith(("keys", "runs", "state"))]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "other").write_text("mine")
    with pytest.raises(ConfigError, match=r"README\.md is there already; replace it with --overwrite"):
        create_app(tmp_path, QUICKSTART)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "other"]
    create_app(tmp_path, QUICKSTART, overwrite=True)
    assert (tmp_path / "recipe.toml").read_text(encoding="utf-8") == QUICKSTART.read_text(encoding="utf-8")
    assert (tmp_path / "README.md").read_text(encoding="utf-8").startswith("# test-nothing-is-overwritten")
    assert (tmp_path / "other").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "nowhere.toml"}, "expected a recipe file"),
        ({"overrides": ["training.round=3"]}, "did you mean 'rounds'"),
        ({"host": 'x"\ny'}, "expected --host as a name"),
    ],
)
def test_a_wrong_request_writes_nothing(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    options = {"recipe": QUICKSTART, **changes}
    with pytest.raises(ConfigError, match=message):
        create_app(tmp_path / "app", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "app").exists()


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", "init", str(tmp_path / "app"), "--recipe", str(QUICKSTART)]
    assert cli.status(words) == 0
    assert f"wrote {tmp_path / 'app' / 'README.md'}" in capsys.readouterr().out
    assert cli.status(words) == 2
    assert cli.status(["deploy", "lokal"]) == 2
    assert "no such command 'lokal'. Did you mean 'local'?" in capsys.readouterr().err
    assert cli.status(["deploy"]) == 0
    assert "certify" in capsys.readouterr().out
