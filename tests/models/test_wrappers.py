"""Networks in torch.compile, DataParallel and their like take part as themselves, under their own names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import polyfed as pf
from polyfed.errors import ConfigError
from polyfed.experiments.exported_model import export_model
from polyfed.models import build
from polyfed.models.wrappers import unwrapped

X, Y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def compiled(network: nn.Module) -> nn.Module:
    return torch.compile(network, backend="eager")  # type: ignore[return-value]


def within(network: nn.Sequential) -> nn.Sequential:
    network[0] = compiled(nn.DataParallel(network[0]))
    network[2] = compiled(network[2])
    return network


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: compiled(plain()),
    "DataParallel": lambda: nn.DataParallel(plain()),
    "averaged": lambda: AveragedModel(plain()),
    "layers, nested": lambda: compiled(within(plain())),
}


def weights_after(network: nn.Module, out: Path, method: pf.Method) -> dict[str, Tensor]:
    clients = [pf.Client(network, (X[k::2], Y[k::2]), (X, Y)) for k in range(2)]
    pf.Federation(clients, method, pf.Training(rounds=1, lr=0.1), out=out).run()
    return load_file(out / "models" / "personal-000.safetensors")


@pytest.mark.parametrize("name", WRAPPED)
def test_a_run_is_that_of_the_network_itself(name: str, tmp_path: Path) -> None:
    method = pf.methods.FedAvg()
    given = WRAPPED[name]()
    names = list(given.state_dict())
    with pytest.warns(UserWarning, match=r"'Sequential' is taken out of torch\.compile, DataParallel"):
        found = weights_after(given, tmp_path / "wrapped", method)
    expected = weights_after(plain(), tmp_path / "plain", method)
    assert found.keys() == expected.keys() == plain().state_dict().keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    assert list(given.state_dict()) == names  # the user's own stays as it was


def test_the_network_itself_stays_what_it_is() -> None:
    warnings.simplefilter("error")
    for network in (plain(), nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 3)))):
        assert unwrapped(network) is network


@pytest.mark.parametrize("make", [torch.jit.script, lambda network: torch.jit.trace(network, X[:1])])
def test_a_program_is_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(
        ConfigError, match=r"client 0: expected a network in Python.*TorchScript; give the network itself"
    ):
        pf.Federation([pf.Client(make(plain()), (X, Y))], pf.methods.Local(), pf.Training(rounds=1))


def test_what_is_sharded_is_refused() -> None:
    class FSDPModule(nn.Linear):
        """As torch.distributed.fsdp.fully_shard makes a layer's class."""

    with pytest.raises(ConfigError, match=r"whole in one process.*FSDP has sharded"):
        pf.split(nn.Sequential(FSDPModule(8, 3)), head="0", extractor=None)


def own(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return compiled(
        nn.Sequential(nn.Flatten(), within(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))))
    )


@pytest.mark.filterwarnings("ignore:'Sequential' is taken out")
def test_a_compiled_network_of_a_recipe_is_split_loaded_and_exported(tmp_path: Path) -> None:
    assert list(build(f"{__name__}:own@none", (1, 8, 8), 10).export()) == [f"1.{n}" for n in plain().state_dict()]
    recipe = pf.Recipe.from_dict(
        {
            "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 30, "max_test_per_client": 10},
            "models": {"architectures": [f"{__name__}:own"]},
            "method": {"name": "fedgh"},
            "training": {"rounds": 1},
        }
    )
    run = pf.run(recipe, out=tmp_path / "run")
    x = torch.randint(0, 255, (5, 1, 8, 8), dtype=torch.uint8)
    model = pf.load(tmp_path / "run", 0, trust=True)
    assert torch.equal(model.scores(x), run.models[0](model.prepare(x)).detach())
    export_model(tmp_path / "run", 0, tmp_path / "model.pt2", trust=True)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x), model.scores(x))
