"""Clients' networks on the Hugging Face Hub: what `polyfed push` sends of a run's, and models read from there.

    config.json               the network, its inputs and how they are prepared: an entry of a run's models/index.json
    model.safetensors         its weights
    model.state.safetensors   what else the method predicts by, if anything
    words.txt                 of texts: the words that have ids
    README.md                 the model card; it is not read

Of a repository nothing but these files is fetched; none of them is code, and each is checked before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from polyfed.data.arrow_tables import plain_hub_errors
from polyfed.data.text import WORDS_FILE
from polyfed.engine.device import parse_device
from polyfed.errors import ConfigError, MissingPackage, described
from polyfed.escaping import json_text, markdown_text
from polyfed.experiments.prediction import (
    BUILDING,
    ClientModel,
    files_of,
    load_model,
    read_checked,
    restore,
    stored_entry,
)
from polyfed.places import without_places
from polyfed.registry import own_names, texts
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.results.fields import count_between, one_of, validated
from polyfed.results.neighbors import neighbors
from polyfed.results.read import parse_json
from polyfed.results.stored_files import ModelEntry
from polyfed.units import human_bytes
from polyfed.version import __version__

__all__ = ["Push", "load", "prepare_push"]

_SCHEME = "hf://"
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_CONFIG = "config.json"
_FILES = {"weights": "model.safetensors", "state": "model.state.safetensors"}
_SHARES = "own shares"  # what closed forms keep of a client's own classes
_LARGEST = 2**24  # bytes of config.json
_OWN = ("samples", "name", "modules")  # of an entry what nobody needs elsewhere: rows, the client's name, folders
_DEALING = ("dirichlet_alpha", "classes_per_client", "group_by", "min_samples", "split")  # of [data]


_WHOSE = {
    "received": "The network that the server sends to one client, as it is before local training.",
    "personal": "The network that one client keeps after local training.",
}


class _Config(ModelEntry):
    """config.json: an entry of models/index.json, and whose it is."""

    library_name: Annotated[str, one_of("polyfed")]
    client: Annotated[int, count_between(0, 2**40)]


@dataclass(frozen=True)
class Push:
    """What would be sent to the Hub; nothing is before `send`.

    repository: "owner/name". private: whether it is, or is to be. files: by name. message: of the commit. keeps: names
    of what the file of state holds.
    """

    repository: str
    private: bool
    files: Mapping[str, bytes]
    message: str
    keeps: Sequence[str] = ()

    def __str__(self) -> str:
        seen = "private" if self.private else "public"
        sizes = [f"  {name:<24}{human_bytes(len(content)):>10}" for name, content in self.files.items()]
        told = [f"  {_FILES['state']} holds: {_told(self.keeps)}"] if self.keeps else []
        return "\n".join([f"to the {seen} repository {self.repository}, as one commit: {self.message}", *sizes, *told])

    def send(self) -> str:
        """Make the repository if it is not there, and add the files; gives its address.

        Raises:
            ConfigError: no token, no network, the Hub refuses, or the repository is not as private as asked for.
        """
        hub = _package()
        with plain_hub_errors(f"cannot push to '{self.repository}'"):
            if hub.get_token() is None:
                raise ConfigError("expected your token of the Hub where its package keeps it, got none: hf auth login")
            api = hub.HfApi()
            api.create_repo(self.repository, private=self.private, exist_ok=True)
            if bool(api.model_info(self.repository).private) != self.private:  # it was there before
                kinds = ("private", "public; add") if self.private else ("public", "private; leave out")
                raise ConfigError(
                    f"nothing was sent: expected '{self.repository}' to be {kinds[0]}, got one that is {kinds[1]} "
                    "--public, or choose another"
                )
            added = [hub.CommitOperationAdd(name, content) for name, content in self.files.items()]
            api.create_commit(self.repository, added, commit_message=self.message)
        return f"{api.endpoint}/{self.repository}"


def prepare_push(
    run: str | Path,
    client: int | str | None,
    repository: str,
    *,
    stage: str | None = None,
    public: bool = False,
    trust: bool = False,
) -> Push:
    """What of a run a push sends: a client's network with a model card.

    Args:
        run: a finished run's folder. client: number or name; None: the only one. repository: "owner/name".
        public: whether everybody may read it. stage, trust: see `load_model`, which has to be able to build the model.

    Raises:
        ConfigError: see `load_model`; no such repository can be, or the model is built from a folder of this machine.
    """
    _check_repository(repository, repository)
    number, entry = stored_entry(Path(run), client)
    for text in texts({key: entry.get(key) for key in BUILDING}):
        if without_places(text) != text:
            raise ConfigError(f"expected a model that can be built elsewhere, got one made of {text!r:.60}")
    model = load_model(run, number, trust=trust, stage=stage)
    folder = Path(run) / "models"
    _, held = files_of(entry, model.stage)
    sums = {_FILES[kind]: entry["sha256"][file] for kind, file in held.items()}
    files = {_FILES[kind]: read_checked(folder / file, sums[_FILES[kind]]) for kind, file in held.items()}
    if entry["texts"] is not None:
        files[WORDS_FILE] = read_checked(folder / WORDS_FILE, entry["texts"]["sha256"])
    config = {key: value for key, value in entry.items() if key not in _OWN} | {"sha256": sums, "stage": model.stage}
    config |= {"stages": {model.stage: {kind: _FILES[kind] for kind in held}}}
    config |= {"keeps": {model.stage: entry["keeps"][model.stage]}}
    whose = {"library_name": "polyfed", "polyfed_version": __version__, "client": number}
    written = {"README.md": _card(model, entry, Path(run), repository), _CONFIG: json_text(whose | config, 2) + "\n"}
    files = {file: text.encode() for file, text in written.items()} | files
    message = f"polyfed {__version__}: client {number}, {model.architecture}"
    return Push(repository, not public, files, message, entry["keeps"][model.stage])


def _told(keeps: Sequence[str]) -> str:
    """What a file of state holds, for those who decide whether others get it."""
    own = "; the class shares of the client's rows are exact, no noise hides them" if _SHARES in keeps else ""
    return ", ".join(keeps) + own


def load(
    source: str | Path,
    client: int | str | None = None,
    *,
    revision: str | None = None,
    device: str = "cpu",
    trust: bool = False,
    stage: str | None = None,
) -> ClientModel:
    """A client's network, from a finished run's folder or from the Hub; no code that came with it is run.

    Args:
        source: the folder, or "hf://owner/name", which is downloaded and kept on this machine by huggingface_hub.
        client: of a folder: number or name; None: the only one. revision: of the Hub: branch, tag or commit.
        device: where the network computes.
        trust: whether networks and methods that are not polyfed's ("package.module:name") may be imported: of a folder
            from where the run found them, of the Hub from what is installed here.
        stage: of a folder: "received" or "personal"; None: the one whose scores the run reports.

    Raises:
        ConfigError: see `polyfed.experiments.prediction.load_model`; what the repository holds is no such model, or it
            cannot be fetched.
    """
    if not str(source).startswith(_SCHEME):
        if revision is not None:
            raise ConfigError(f"expected a revision with 'hf://owner/name' only, got one of {source}")
        return load_model(source, client, device, trust, stage)
    for what, given in (("client", client), ("stage", stage)):
        if given is not None:
            raise ConfigError(f"expected no {what} with {source}, which holds one model, got {described(given)}")
    repository = str(source).removeprefix(_SCHEME)
    _check_repository(repository, str(source))
    place = parse_device(device)
    hub = _package()
    wanted = [_CONFIG, *_FILES.values(), WORDS_FILE]
    with plain_hub_errors(f"cannot load {source}"):
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=wanted))
    entry = _read_config(folder / _CONFIG, str(source))
    return restore(source, folder / _CONFIG, entry.pop("client"), entry, place, trust)


def _read_config(path: Path, source: str) -> dict[str, Any]:
    """What config.json says, without places in which to look for code."""
    if not path.exists():
        raise ConfigError(f"expected a model that polyfed has pushed in {source}, got a repository without config.json")
    if path.stat().st_size > _LARGEST:
        raise ConfigError(f"expected at most {_LARGEST} bytes in {path}, got {path.stat().st_size}")
    try:
        config = parse_json(path.read_bytes())
        validated(_Config, config)
    except ValueError as error:
        raise ConfigError(f"expected a model that polyfed has pushed in {source}, its config.json: {error}") from None
    return {key: value for key, value in config.items() if key not in _OWN}


def _check_repository(name: str, given: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"expected a repository of the Hub as owner/name, got '{given}'")


def _package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingPackage(
            "models of the Hub need the package huggingface_hub; install it with: pip install 'polyfed[hub]'"
        ) from None
    return huggingface_hub


# the model card ---------------------------------------------------------------------------------------------------


def _card(model: ClientModel, entry: Mapping[str, Any], run: Path, repository: str) -> str:
    """README.md: metadata that the Hub reads, the run's table, how the model is used."""
    record = load_runs(run)[0] if (run / "result.json").exists() else None
    facts = dict(_facts(model, entry)) | ({} if record is None else dict(_facts_of_run(record, model)))
    table = "\n".join(f"| {head} | {markdown_text(text)} |" for head, text in facts.items())
    tags = ["polyfed", "federated-learning", entry["method"]]
    metadata = {"library_name": "polyfed", "tags": tags} | _task(model)
    front = "\n".join(f"{key}: {json_text(value)}" for key, value in metadata.items())  # JSON is YAML, too
    own = own_names({key: entry.get(key) for key in BUILDING})
    needed = f"\nInstall the code of {', '.join(own)} first: it is not in this repository.\n" if own else ""
    return f"""---
{front}
---

# {markdown_text(model.architecture)}, trained by {markdown_text(entry["method"])}

{_WHOSE[model.stage]} Of a federated run, made with polyfed {__version__}.

| | |
| --- | --- |
{table}

## Use
{needed}
```python
import polyfed as pf

model = pf.load("{_SCHEME}{repository}"{", trust=True" if own else ""})
print(model.predict("FILE"))
```

## License

Not stated. Whoever publishes the model chooses one: `license:` in the metadata above.
"""


def _task(model: ClientModel) -> dict[str, str]:
    """What the Hub calls the model's task, where it has a word for it."""
    kind = "classification" if model.scale is None else "regression"
    if model.form.feature_names:
        return {"pipeline_tag": f"tabular-{kind}"}
    if model.scale is None and (model.form.images or model.form.vocabulary):
        return {"pipeline_tag": "image-classification" if model.form.images else "text-classification"}
    return {}


def _facts(model: ClientModel, entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    card = model.method.card
    settings = ", ".join(f"{key} = {json_text(value)}" for key, value in entry["hyperparameters"].items())
    yield "method", f"{entry['method']}{f' ({card.paper})' if card.paper else ''}"
    yield "hyperparameters", settings or "none"
    yield "inputs", str(model.form)
    yield "outputs", f"{entry['classes']} classes" if model.scale is None else "a number"
    yield "weights of round", str(entry["round"])
    if entry["keeps"][model.stage]:
        yield "beside the weights", _told(entry["keeps"][model.stage])
    yield "shared in a round", f"up: {card.up} numbers; down: {card.down}; in letters of polyfed's page of the method"


def _facts_of_run(record: RunRecord, model: ClientModel) -> Iterator[tuple[str, str]]:
    result = record.result
    score = result.main_score
    data = record.recipe.data
    yield "data", f"{without_places(result.dataset)}, {result.clients} clients"
    dealing = [f"{key} = {json_text(data[key])}" for key in _DEALING if key in data]
    if "partition" in data:
        yield "partition", ", ".join([str(data["partition"]), *dealing])
    yield "rounds", str(result.rounds)
    yield "seed", str(result.seed)
    stage = model.stage  # other stages are of other networks
    found = result.accuracy_by_stage.get(stage)
    if found is not None and found.mean is not None and found.std is not None:
        text = f"{score.text(found.mean)} ± {score.text(found.std)}{score.unit}"
        yield f"test {score.title}, {stage}, mean and std over clients", text
    row = next((row for row in result.clients_table or () if row.id == model.client), None)
    if row is not None and row.accuracy is not None and result.evaluation.stage == stage:
        yield f"test {score.title}, {stage}, this client", score.text(row.accuracy) + score.unit
    if row is not None and row.bytes_up is not None and row.bytes_down is not None:
        text = f"up: {human_bytes(row.bytes_up)}; down: {human_bytes(row.bytes_down)}"
        yield "shared in all by this client", text
    for unit, epsilon in result.epsilon.items():
        told = f"{epsilon:.4g} at delta {result.delta:g}; {neighbors(result.epsilon_of.get(unit, ()))}"
        yield f"epsilon by {unit}", told
