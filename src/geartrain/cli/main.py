"""The command line: what each command takes here, work in a file for each.

    geartrain train RECIPE | simulate RECIPE | compare RECIPE | evaluate RUN | recipes
              graph RECIPE | report RUN | native | demo

Commands are imported when they are called, so that help comes at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geartrain.cli.options import (
    DEVICE,
    FLAG,
    Commands,
    ComparedName,
    DataOption,
    EpochsOption,
    EvaluateOption,
    Format,
    JsonFlag,
    LinkOption,
    MixerOption,
    OnWorkerDeathName,
    OutOption,
    PrecisionName,
    RecipeArgument,
    RunArgument,
    RuntimeName,
    SeedOption,
    SpeedsOption,
    SplitName,
    TopologyOption,
    active_or_auto,
)

app = typer.Typer(
    name="geartrain",
    cls=Commands,
    help="Asynchronous model-parallel training of networks that follow their data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from geartrain.cli.version import version

        print(f"geartrain {version()}")
        raise typer.Exit(0)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", metavar=FLAG, callback=_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeArgument,
    data: DataOption = None,
    runtime: Annotated[
        RuntimeName | None,
        typer.Option(
            help="Default as suits the recipe; auto: measures the first instances, and chooses.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Default 2 or 1, as suits the recipe; with --runtime auto at most so many, by "
            "default as many as there are cores.",
            show_default=False,
        ),
    ] = None,
    max_active: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER|auto",
            help="Most instances in flight; auto: as the network wants; default: the recipe's.",
        ),
    ] = None,
    update_every: Annotated[
        int | None,
        typer.Option(min=1, help="Gradient rows or instances an update; default: the recipe's."),
    ] = None,
    epochs: EpochsOption = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC>=X",
            help="Stop after the evaluation that reaches it (quote it); exit 1 if none does.",
        ),
    ] = None,
    seed: SeedOption = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the recipe; may be repeated."),
    ] = None,
    out: OutOption = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar=FLAG, help="Continue the run in --out, as it was begun."),
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, help="Instances between checkpoints; default: every epoch."),
    ] = None,
    evaluate_every: EvaluateOption = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Copies of the recipe's bottleneck, each on a worker of its own; with --topology "
            "or --mixer of the whole model. Default 1.",
            show_default=False,
        ),
    ] = None,
    topology: TopologyOption = None,
    mixer: MixerOption = None,
    speeds: SpeedsOption = None,
    link: LinkOption = None,
    precision: Annotated[
        PrecisionName | None,
        typer.Option(
            help="bf16: rows and products in bfloat16, weights in float32. Default full.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar=DEVICE,
            help="Where the model lives; a run may be resumed on another. Default the CPU.",
            show_default=False,
        ),
    ] = None,
    on_worker_death: Annotated[
        OnWorkerDeathName | None,
        typer.Option(
            help="With --runtime processes, hosts or ray: restore goes on from the last "
            "checkpoint, go_on has other copies of the model (--mixer) go on. Default raise, which "
            "ends the run.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'ADDRESS [COMMAND ...]'",
            help="With --runtime hosts: a host for a worker, and what starts a program there, such "
            "as '10.0.0.2 ssh -T 10.0.0.2'; repeated for more. Default: this host.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="With --runtime hosts: of this host, as workers see it. With --runtime ray: of a "
            "cluster, or auto; default: a Ray on this host.",
            show_default=False,
        ),
    ] = None,
    resources: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,...",
            help="With --runtime ray: of each worker, as CPU=1,GPU=0.5. Default CPU=1.",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", metavar=FLAG, help="Also write scalars for TensorBoard."),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace", metavar=FLAG, help="Also write trace.json for ui.perfetto.dev."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a recipe.

    The JSON has recipe, runtime, workers, max_active, update_every, replicas, topology, mixer,
    precision, device, seed, epochs (trained), instances, train_seconds, instances_per_second,
    valid, history, reached, updates and staleness of every part, peak_rss_mib, and with copies of
    the model copies: distance, bytes_per_gradient, letters, letter_staleness, instances of each.
    Seconds are of training alone, since the run began; epochs are fractions where the run is
    evaluated within them. With --on-worker-death restore or go_on also deaths (of worker
    processes, since it was last resumed) and repeated (instances that were trained again).
    """
    from geartrain.cli import train as command

    given = {
        "runtime": None if runtime is None else runtime.value,
        "workers": workers,
        "max_active": active_or_auto(max_active),
        "update_every": update_every,
        "epochs": epochs,
        "seed": seed,
        "until": until,
        "checkpoint_every": checkpoint_every,
        "evaluate_every": evaluate_every,
        "replicas": replicas,
        "topology": topology,
        "mixer": mixer,
        "speeds": speeds,
        "link": link,
        "precision": None if precision is None else precision.value,
        "device": device,
        "on_worker_death": None if on_worker_death is None else on_worker_death.value,
        "hosts": "; ".join(host) if host else None,
        "address": address,
        "resources": resources,
    }
    watching = command.Watching(tensorboard=tensorboard, trace=trace, as_json=as_json)
    command.train(recipe, given, option or [], data, out, resume, watching)


@app.command()
def simulate(
    recipe: RecipeArgument,
    replicas: Annotated[
        int, typer.Option(min=1, help="Copies of the model, each on a device of its own.")
    ] = 4,
    topology: TopologyOption = None,
    mixer: MixerOption = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="SPEED,...", help="Speeds of the devices, repeated in turn."),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LATENCY,BANDWIDTH[,BUFFER]",
            help="Simulated links, such as 50us,1.25GB; with --hosts it may be repeated.",
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="A run's folder, whose costs are taken; default: they are measured."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Only say what so many hosts would do, a table; --replicas is not looked at.",
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="With --hosts: for each host. Default: of some updates."),
    ] = None,
    data: DataOption = None,
    max_active: Annotated[
        int | None, typer.Option(min=1, help="Most instances in flight in each copy.")
    ] = None,
    epochs: EpochsOption = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="METRIC>=X", help="Stop there (quote it); exit 1 if missed."),
    ] = None,
    evaluate_every: EvaluateOption = None,
    seed: SeedOption = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A number of the recipe; may be repeated."),
    ] = None,
    out: OutOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train copies of a recipe's model on imagined devices: real numbers, a virtual clock.

    What firings take is measured first, in one thread of this machine; --device multiplies its
    speed. Seconds in the JSON, which is that of 'geartrain train', are virtual.

    With --hosts 4,16,64 an epoch is trained on as many hosts over each --link: the parts of one
    model apart, copies that exchange by --mixer, and copies with all-reduce. The table, and
    forecasts in the JSON, have instances_per_second, busy (share of the hosts' time), staleness and
    bytes_per_instance between hosts.
    """
    from geartrain.cli import simulate as command
    from geartrain.cli.train import Watching

    given = {
        "workers": replicas,
        "max_active": max_active,
        "update_every": None,
        "epochs": epochs,
        "seed": seed,
        "until": until,
        "checkpoint_every": None,
        "evaluate_every": evaluate_every,
        "replicas": replicas,
        "topology": topology,
        "mixer": mixer or "gradients",
        "speeds": device,
        "device": None,
        "link": link[0] if link else None,
        "precision": None,
    }
    if hosts is not None:
        asked = command.Asked(hosts, link or [], recorded, instances)
        command.foresee(recipe, given, option or [], data, asked, as_json)
        return
    watching = Watching(tensorboard=False, trace=False, as_json=as_json)
    command.simulate(recipe, given, option or [], data, out, watching, recorded)


@app.command()
def compare(
    recipe: RecipeArgument,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Systems, as NAME or NAME:BATCH, and ours with other settings, as "
            "ours:replicas=2:hidden=64, ours:runtime=processes, ours:precision=bf16 or "
            "ours:device=cuda, or another method, as greedy; default: ours-sync and the baselines "
            "that are not slow.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ... for every system.")] = 3,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of every system; default: what suits each.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC>=X",
            help="Stop each system there (quote it); exit 1 if ours misses it. Default: the "
            "recipe's target, where nobody stops.",
        ),
    ] = None,
    evaluate_every: EvaluateOption = None,
    data: DataOption = None,
    runtime: Annotated[
        ComparedName,
        typer.Option(help="Of ours; baselines are one process, whose kernels have as many cores."),
    ] = ComparedName.THREADS,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Of ours; default 2, or 1 on one core.")
    ] = None,
    max_active: Annotated[
        int | None, typer.Option(min=1, help="Of ours; default: the recipe's.")
    ] = None,
    update_every: Annotated[
        int | None, typer.Option(min=1, help="Of ours; default: the recipe's.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar=DEVICE,
            help="Where ours lives; baselines stay on the CPU. Default the CPU.",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option of the recipe; baselines keep their learning rates. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for compare.json, compare.md, runs.jsonl and the figure compare.png."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train ours and the baselines side by side, each in a process of its own.

    All get the same data, model size, order and number of kernel threads, seed after seed. Numbers
    are medians over the seeds; a seed that misses the target counts as infinitely late. Peaks of
    worker processes are added; pages that they have in common count in each. The JSON has rows with
    system, instances_per_second, seconds_to_target, epochs_to_target, valid, peak_rss_mib,
    updates_per_epoch of every part, spread (least and most over the seeds) and, for ours,
    staleness: mean and max of every part.
    """
    from geartrain_baselines import compare as command

    given = {
        "runtime": runtime.value,
        "workers": workers,
        "max_active": max_active,
        "update_every": update_every,
        "epochs": epochs,
        "seed": 0,
        "until": until,
        "checkpoint_every": None,
        "evaluate_every": evaluate_every,
        "replicas": None,
        "precision": None,
        "device": device,
    }
    command.compare(recipe, given, option or [], against, seeds, data, out, as_json)


@app.command()
def evaluate(
    run: RunArgument,
    data: DataOption = None,
    split: Annotated[SplitName, typer.Option(help="Which data.")] = SplitName.DEV,
    device: Annotated[
        str | None,
        typer.Option(
            metavar=DEVICE,
            help="Where the model lives; default: where it was trained.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate a run's best checkpoint on a split."""
    from geartrain.cli import evaluate as command

    command.evaluate(run, data, split.value, as_json, device)


@app.command()
def recipes(as_json: JsonFlag = False) -> None:
    """List the recipes."""
    from geartrain.cli import recipes as command

    command.recipes(as_json)


@app.command()
def graph(
    recipe: RecipeArgument,
    format: Annotated[Format, typer.Option(help="How to draw it.")] = Format.TEXT,
) -> None:
    """Print a recipe's graph."""
    from geartrain.cli.exits import preparing
    from geartrain.recipes import find_recipe

    with preparing():
        found = find_recipe(recipe).draw()
    drawn = {Format.TEXT: found.__str__, Format.MERMAID: found.mermaid, Format.DOT: found.dot}
    print(drawn[format]())


@app.command()
def report(run: RunArgument) -> None:
    """Write a run's page, report.html in its folder."""
    from geartrain.cli.exits import preparing
    from geartrain.observe.report import write_report

    with preparing():
        page = write_report(run)
    print(page)


@app.command()
def demo(
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of recipe shapes; may be repeated."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of each; default 3.")] = None,
    seed: SeedOption = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for both runs; default runs/demo-DATE-TIME.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train drawn images on two worker processes beside one worker, in turns, within a minute.

    Says loss, staleness, busy share and throughput of both, how many times as fast two were, and
    writes a report of each. The JSON has one and two, each as of 'geartrain train' with busy (a
    share for each worker) and losses (of the epochs), ratio, ratios (of the epochs), cores and
    reports.
    """
    from geartrain.cli import demo as command

    command.demo(option or [], epochs, seed, out, as_json)


@app.command()
def native() -> None:
    """Compile the native kernels now rather than on first use; exit 1 if they cannot be."""
    from geartrain.cli.native import native as command

    command()
