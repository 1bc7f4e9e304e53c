"""Every key of every section either always acts, or is refused where it does not, in a line that says what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError
from polyfed.experiments import build, reference
from polyfed.experiments.build import build_federation

TABLE = "csv:table.csv"  # rows of numbers, in the folder of the test


@dataclass(frozen=True)
class Refused:
    """Settings in which the key does nothing: of its section, of others; and what the error says."""

    own: dict[str, Any]
    says: str
    others: dict[str, dict[str, Any]]


def refused(says: str, others: dict[str, dict[str, Any]] | None = None, **own: Any) -> Refused:
    return Refused(own, says, others or {})


def with_data(**keys: Any) -> dict[str, dict[str, Any]]:
    return {"data": keys}


ONE_LAPTOP = {"profiles": ["laptop"]}
NO_UPLOADS = "does nothing with method 'local', which uploads nothing"
FEDAVG = {"method": {"name": "fedavg"}, "models": {"architectures": ["digits-cnn1"]}}
NO_DEVICES = "does nothing beside profiles = []; set profiles"
NO_PARTITION = "does nothing beside partition = 'iid'; set partition to"
NO_TEXTS = "dataset 'digits' has no use for t"

ALWAYS = {  # keys that act in every run, or are kept for whoever reads it
    "data": "dataset class_names limit_train label_space num_clients partition split test holdout "
    "max_rows_per_client max_train_per_client max_test_per_client",
    "models": "architectures feature_dim",
    "method": "name adapters",
    "training": "rounds client_fraction local_epochs batch_size optimizer lr lr_schedule weight_decay",
    "evaluation": "stage weighting every_n_rounds metrics held_out",
    "availability": "dropout_rate late_joiners",
    "privacy": "max_grad_norm",
    "devices": "profiles custom.NAME",
    "adversaries": "label_flip_fraction",
    "plugins": "name",
    "run": "seed device executor checkpoint_every out label paper_tables preset preset_note overrides modules control",
}

CASES: dict[str, Refused] = {
    "data.root": refused("does nothing beside dataset = 'digits', which reads no files", root="folder"),
    "data.image_column": refused("dataset 'digits' has no use for image_column", image_column="image"),
    "data.label_column": refused("dataset 'digits' has no use for label_column", label_column="label"),
    "data.feature_columns": refused("dataset 'digits' has no use for feature_columns", feature_columns=["a"]),
    "data.category_columns": refused("dataset 'digits' has no use for category_columns", category_columns=["a"]),
    "data.features": refused("dataset 'digits' has no use for features", features={"a": {"unit": "m"}}),
    "data.categories": refused("dataset 'digits' has no use for categories", categories={"a": ["b"]}),
    "data.missing_values": refused("dataset 'digits' has no use for missing_values", missing_values="client_mean"),
    "data.tokens": refused(NO_TEXTS, tokens="characters"),
    "data.text_column": refused(NO_TEXTS, text_column="text"),
    "data.vocab_size": refused("; text_column names a column of texts", vocab_size=100),
    "data.max_length": refused("; text_column names a column of texts", max_length=10),
    "data.word_vectors": refused("; text_column names a column of texts", word_vectors="glove.txt"),
    "data.config": refused("dataset 'digits' has no use for config", config="plain"),
    "data.revision": refused("dataset 'digits' has no use for revision", revision="main"),
    "data.mean": refused("mean and std expect as many numbers each", mean=[0.5]),
    "data.std": refused("mean and std expect as many numbers each", std=[0.5]),
    "data.limit_test": refused("'digits' has no official test side", limit_test=50),
    "data.image_size": refused("data.image_size: expected images", dataset=TABLE, image_size=8),
    "data.task": refused("data.task 'regression': expected a table", task="regression"),
    "data.dirichlet_alpha": refused(NO_PARTITION, dirichlet_alpha=0.1),
    "data.min_samples": refused(NO_PARTITION, min_samples=3),
    "data.classes_per_client": refused(NO_PARTITION, classes_per_client=3),
    "data.class_assignment": refused(NO_PARTITION, class_assignment="shards"),
    "data.group_by": refused(NO_PARTITION, group_by="user"),
    "data.num_groups": refused(NO_PARTITION, num_groups=3),
    "data.halved_client_fraction": refused(
        "does nothing with 4 clients; set it to at least", halved_client_fraction=0.1
    ),
    "data.public_dataset": refused(
        "data.public_dataset does nothing with method 'local', which uses no public data",
        public_dataset="others:images",
    ),
    "data.public_samples": refused("does nothing without public_dataset", public_samples=7),
    "models.assignment": refused("set architectures to two or more", assignment="blocks"),
    "models.feature_pool": refused("set feature_dim", feature_pool=True),
    "method.alone": refused("method.alone does nothing with method 'local'", alone=True),
    "method.personalize": refused(
        "method.personalize: expected a method that scores what clients", personalize="tuned"
    ),
    "pretraining.epochs": refused("expected hold-out rows to train on, got none", epochs=2),
    "pretraining.batch_size": refused("set epochs above 0", batch_size=3),
    "pretraining.optimizer": refused("set epochs above 0", optimizer="sgd"),
    "pretraining.lr": refused("set epochs above 0", lr=0.1),
    "training.momentum": refused("momentum is SGD's; with optimizer 'adam'", optimizer="adam", momentum=0.9),
    "training.augmentation": refused(
        "expects images, 'csv:table.csv' has none", with_data(dataset=TABLE), augmentation="crop"
    ),
    "evaluation.extra_stages": refused(
        "does nothing beside stage = 'personal'", stage="personal", extra_stages=["personal"]
    ),
    "evaluation.missing_classes": refused("every client has training rows of all classes", missing_classes=True),
    "evaluation.held_out_epochs": refused("set held_out above 0", held_out_epochs=2),
    "evaluation.patience": refused("validation", with_data(split="8:0:2"), patience=3),
    "evaluation.min_delta": refused("set patience above 0", min_delta=0.1),
    "availability.dropout_stage": refused("set dropout_rate above 0", dropout_stage="after"),
    "availability.join_round": refused("set late_joiners above 0", join_round=4),
    "privacy.upload_clip_norm": refused(f"privacy.upload_clip_norm = 1.0 {NO_UPLOADS}", upload_clip_norm=1.0),
    "privacy.upload_noise_multiplier": refused("expected upload_clip_norm above 0", upload_noise_multiplier=1.0),
    "privacy.noise_multiplier": refused("uploads nothing", noise_multiplier=1.0),
    "privacy.sampling": refused("set max_grad_norm above 0", sampling="shuffled"),
    "privacy.target_epsilon": refused("uploads nothing", target_epsilon=3.0),
    "privacy.delta": refused("it needs privacy.noise_multiplier", FEDAVG, delta=1e-6),
    "devices.assignment": refused("set profiles to two or more", **ONE_LAPTOP, assignment="blocks"),
    "devices.custom": refused(
        "custom.gpu does nothing, as no client has it; name it in profiles",
        **ONE_LAPTOP,
        custom={"gpu": {"flops": 1.0}},
    ),
    "devices.round_timeout": refused(NO_DEVICES, round_timeout=1.0),
    "devices.buffer_size": refused(NO_DEVICES, buffer_size=2),
    "devices.on_out_of_memory": refused(NO_DEVICES, on_out_of_memory="leave out"),
    "devices.time_jitter": refused(NO_DEVICES, time_jitter=0.1),
    "secure_sums.enabled": refused(f"secure_sums.enabled = true {NO_UPLOADS}", enabled=True),
    "secure_sums.threshold": refused("set enabled to true", threshold=0.8),
    "secure_sums.min_clients": refused("set enabled to true", min_clients=5),
    "robust_aggregation.aggregator": refused(
        f"robust_aggregation.aggregator = 'median' {NO_UPLOADS}", aggregator="median"
    ),
    "robust_aggregation.byzantine_fraction": refused("set aggregator to", byzantine_fraction=0.3),
    "robust_aggregation.max_magnitude": refused(NO_UPLOADS, max_magnitude=10.0),
    "adversaries.sign_flip_fraction": refused(NO_UPLOADS, sign_flip_fraction=0.2),
    "adversaries.attack_scale": refused("set sign_flip_fraction above 0", attack_scale=3.0),
    "run.workers": refused("expected workers = 1, as the executor 'serial' has one", executor="serial", workers=2),
    "run.keep": refused("validation", with_data(split="8:0:2"), keep="best"),
    "run.loggers": refused("run.loggers: expected a run folder", loggers=["tensorboard"]),
    "run.client_names": refused("'north' has gone", client_names=["north"]),
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    whole: dict[str, dict[str, Any]] = {
        "data": {"dataset": "digits", "num_clients": 4},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "local"},
        "training": {"rounds": 2},
    }
    return Recipe.from_dict({**whole, **{name: {**whole.get(name, {}), **keys} for name, keys in sections.items()}})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table, and with a data set of one's own."""
    rows = "\n".join(f"{row},{row % 7},{row % 2}" for row in range(80))
    (tmp_path / "table.csv").write_text(f"a,b,label\n{rows}\n")
    (tmp_path / "others.py").write_text(
        "import torch\n\ndef images():\n    x = torch.randint(0, 255, (40, 1, 8, 8), dtype=torch.uint8)\n"
        "    return x, torch.arange(40) % 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_key_is_in_the_table() -> None:
    sections = {section.name: section for section in reference.sections()}
    known = [f"{name}.{key.name}" for name, section in sections.items() if "." not in name for key in section.keys]
    always = [f"{section}.{key}" for section, keys in ALWAYS.items() for key in keys.split()]
    assert sorted([*CASES, *always]) == sorted([*known, "devices.custom.NAME"])


@pytest.mark.parametrize("key", CASES)
def test_a_key_that_does_nothing_is_refused(key: str, place: Path) -> None:
    section = key.partition(".")[0]
    case = CASES[key]
    with pytest.raises(ConfigError) as refusal:
        pf.run(recipe(**{section: case.own}, **case.others))
    said = str(refusal.value)
    assert "\n" not in said
    assert case.says in said
    assert key.rpartition(".")[2] in said


@pytest.mark.parametrize("key", ["public_samples", "local_epochs"])
def test_a_key_that_needs_more_than_its_neighbor(key: str, place: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "public_samples": {"data": {"public_dataset": "others:images", "public_samples": 7}},
        "local_epochs": {"training": {"local_epochs": 3}, "method": {"name": "fedrep", "extractor_epochs": 1}},
    }[key]
    with pytest.raises(ConfigError) as refusal:
        pf.check(recipe(**sections))
    said = str(refusal.value)
    assert "does nothing with method" in said
    assert key in said or key == "public_samples"  # of data.public_dataset, which goes with it


def test_a_method_that_was_asked_for_is_told() -> None:
    """A comparison has its settings for the other methods' sake."""
    bounded = recipe(privacy={"upload_clip_norm": 1.0}, **FEDAVG)
    line = "privacy.upload_clip_norm = 1.0 does nothing with method 'local', which uploads nothing"
    assert line in build_federation(bounded.choose("local")).remarks()
    assert not [said for said in build_federation(bounded).remarks() if "does nothing" in said]
    assert pf.check(bounded, method="local").facts["method"] == "local"
    with pytest.raises(ConfigError, match=r"privacy\.upload_clip_norm"):
        pf.check(bounded.choose("local"))


def test_a_mean_beside_pretrained_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    as_trained = Prepare((0.4,), (0.2,))
    monkeypatch.setattr(build, "input_normalization", lambda source, names: as_trained)
    with pytest.raises(ConfigError, match=r"data\.mean does nothing beside pre-trained networks"):
        build_federation(recipe(data={"mean": [0.5], "std": [0.5]}))
