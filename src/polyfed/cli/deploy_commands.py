"""The commands of `polyfed deploy`: a recipe on several machines, or with a server and nodes on this one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.options import (
    AsJson,
    Loggers,
    MethodName,
    Overrides,
    PresetNames,
    Quiet,
    RecipeOption,
    ReplaceRun,
    RunFolder,
    Seed,
    Trust,
    with_loggers,
)
from polyfed.cli.output import (
    all_problems_listed,
    print_files,
    print_json,
    print_run,
    print_text,
    raise_if_nothing_learnt,
)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the app.", show_default=False)],
    recipe: RecipeOption,
    host: Annotated[str, typer.Option(metavar="NAME", help="How nodes call the server's machine.")] = "localhost",
    method: MethodName = None,
    settings: Overrides = None,
    seed: Seed = None,
    preset: PresetNames = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write a recipe as a Flower app.

    Beside the app: a README with all commands, and examples of services and of a container.

    \b
    polyfed deploy init federation --recipe recipes/quickstart.toml --host fl.example.org
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.app_template import create_app

    options: dict[str, Any] = {"method": method, "seed": seed, "preset": preset, "host": host, "overwrite": overwrite}
    print_files(create_app(folder, recipe, overrides=settings or (), **options))


def certify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the certificates.", show_default=False)],
    host: Annotated[
        list[str], typer.Option("--host", metavar="NAME", help="How nodes call the server. May be repeated.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the server's certificate that is there.")
    ] = False,
) -> None:
    """Write the server's certificate, which is good for a year, and its authority.

    An authority that the folder holds already is kept, and signs the new certificate: nodes need no change.

    \b
    polyfed deploy certify keys --host fl.example.org --host 10.0.0.5
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.tls import make_server_certificate

    print_files(make_server_certificate(folder, host, overwrite))


def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its private half.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace keys that are there.")] = False,
) -> None:
    """Write a node's key pair.

    FILE stays on the node; FILE.pub is registered with the server.

    \b
    polyfed deploy key keys/node
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.tls import make_node_key

    print_files(make_node_key(file, overwrite))


def forget(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder: the server's, or of polyfed run.", show_default=False)
    ],
    client: Annotated[int, typer.Argument(min=0, metavar="CLIENT", help="The client's number.", show_default=False)],
    trust: Trust = False,
) -> None:
    """Take a client's rows out of a run that is stopped, for good.

    Of methods that can: closed-form and own-plus-common, with method.keep_sums=true. The server's sums and solution are
    then as if the client had sent none. It is listed in RUN/forgotten.json, with which every checkpoint is read and
    written: nothing is taken from it again, whatever goes on in this folder; it receives what all receive. Models are
    removed, as others' have its rows in them. Records stay as they are. Asked again, it does what is left to do.

    \b
    polyfed deploy forget runs/ours 2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.experiments import forgetting

    had_models = forgetting.forget(run, client, trust)
    print_text(f"the rows of client {client} do not count any more; go on with resume=true, so that all clients know")
    if had_models:
        print_text("models/ is removed, as models had them in them; a run that goes on writes it again at its end")


def server(
    keys: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that certify has filled.", show_default=False)],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where it listens; a proxy on this machine lets nodes in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="NUMBER", help="Its port.")] = 8000,
    database: Annotated[Path, typer.Option(metavar="FILE", help="Remembers which nodes are registered.")] = Path(
        "superlink.db"
    ),
) -> None:
    """Run Flower's server, for nodes and its operator alone.

    Nodes with a registered key have their routes; the rest (apps, keys, runs) is for programs of the user who starts
    this, on this machine.

    \b
    polyfed deploy server keys
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.superlink import serve_nodes

    serve_nodes(keys, host=host, port=port, database=database)


def node(
    recipe: RecipeOption,
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.", show_default=False)],
    config: Annotated[
        str, typer.Option("--node-config", metavar="TEXT", help="This node's own settings.", show_default=False)
    ],
    authority: Annotated[
        Path, typer.Option("--authority", metavar="FILE", help="Certificate by which the server is known.")
    ] = Path("keys/ca.crt"),
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private half of this node's keys.")] = Path("keys/node"),
) -> None:
    """Be a node: one client, with a recipe of its own.

    Code that a server sends is not run: the installed polyfed answers, by the recipe on this machine, and refuses a
    server whose settings are others.

    \b
    polyfed deploy node --recipe recipes/quickstart.toml --server 10.0.0.5:443 --node-config 'client-id=0 state-dir="s"'
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.config.recipe import Recipe
    from polyfed.deploy.supernode import join

    join(Recipe.load(recipe), config, server=server, authority=authority, key=key)


def check(
    recipe: RecipeOption,
    config: Annotated[
        str | None,
        typer.Option("--node-config", metavar="TEXT", help="The node's own settings [client 0, the recipe's data]."),
    ] = None,
    json: AsJson = False,
) -> None:
    """What does a node send, at most?

    A line for each kind of answer: how often, what, how many bytes, what hides it; and the epsilon of
    all. Tries some batches with the node's rows; writes nothing and sends nothing.

    \b
    polyfed deploy check --recipe recipes/quickstart.toml
    polyfed deploy check --recipe recipes/quickstart.toml --node-config 'client-id=1 state-dir="s" share-model=true'
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.config.recipe import Recipe
    from polyfed.deploy.answer_table import answer_table
    from polyfed.deploy.node_config import NodeConfig
    from polyfed.deploy.supernode import read_config

    own = NodeConfig.model_validate({"client-id": 0, "state-dir": "."}) if config is None else read_config(config)
    with all_problems_listed():
        table = answer_table(Recipe.load(recipe), own)
    if json:
        print_json(dataclasses.asdict(table))
    else:
        print_text(str(table))


def local(
    recipe: RecipeOption,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Clients, each a node of its own [the recipe's].")
    ] = None,
    method: MethodName = None,
    settings: Overrides = None,
    seed: Seed = None,
    out: RunFolder = None,
    overwrite: ReplaceRun = False,
    loggers: Loggers = None,
    preset: PresetNames = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe with a server and nodes on this machine.

    With TLS and node authentication, over 127.0.0.1 alone; the run folder and its numbers are those of `polyfed run`.

    \b
    polyfed deploy local --recipe recipes/quickstart.toml --nodes 3 --set training.rounds=2
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.deploy.local_cluster import local

    options: dict[str, Any] = {"method": method, "seed": seed, "preset": preset, "out": out, "nodes": nodes}
    done = local(recipe, overwrite=overwrite, overrides=with_loggers(settings, loggers), progress=not quiet, **options)
    print_run(str(done.path))
    raise_if_nothing_learnt(done.result)
