"""Two Typer apps, no logic, no torch or jax at import time."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .olmo_jax.errors import BadInput

SETTINGS = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
convert_app = typer.Typer(help="Convert OLMo 3 checkpoints between PyTorch and Orbax/JAX.", **SETTINGS)
parity_app = typer.Typer(
    help="Prove that two frameworks compute the same function.", **(SETTINGS | {"no_args_is_help": False})
)


@parity_app.callback(invoke_without_command=True)
def gate(
    context: typer.Context,
    reference: Annotated[
        Path | None, typer.Option(help="Hugging Face folder or hub id, ORG/NAME@REVISION: the side believed.")
    ] = None,
    candidate: Annotated[Path | None, typer.Option(help="Orbax tree: the side tested.")] = None,
    also: Annotated[
        str | None, typer.Option(help="core:DIR, AI2's OLMo-core model of that step folder as a second reference.")
    ] = None,
    batch: Annotated[Path | None, typer.Option(help='Prompts, one {"id", "text"} or {"id", "tokens"} a line.')] = None,
    only_batch: Annotated[
        bool, typer.Option("--only-batch/--no-only-batch", help="Leave the built-in sequences out.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts, and say so.")] = None,
    profile: Annotated[str | None, typer.Option(help="default, strict or published.")] = None,
    candidate_fn: Annotated[
        str | None, typer.Option(help="package.module:function that builds the model to test: docs/candidate-fn.md.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Loss and the gradient of every parameter too.")
    ] = False,
    z_loss: Annotated[float | None, typer.Option(min=0, help="Its coefficient in the loss, 1e-5 for OLMo.")] = None,
    streamed: Annotated[
        bool | None,
        typer.Option(
            "--streamed/--no-streamed",
            help="One layer in memory at a time; by default where the whole model does not fit.",
        ),
    ] = None,
    candidate_device: Annotated[
        str | None, typer.Option(help="cpu, gpu or tpu: where JAX runs; by default what JAX finds.")
    ] = None,
    reference_device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda: where torch runs. On a TPU host it runs on the CPU, or give a record."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="fsdp=4,tensor=2: spread the candidate over all devices like that.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Of the candidate, under jax.distributed on this machine.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE in the config of both sides: sliding_window=64. Repeatable.")
    ] = None,
    limit: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: a limit set by hand, marked as such.")] = None,
    accept_uncovered: Annotated[list[str] | None, typer.Option(help="Pass although this was not covered.")] = None,
    weights_may_differ: Annotated[
        bool,
        typer.Option(
            "--weights-may-differ/--no-weights-may-differ",
            help="Compare different checkpoints: unequal weights do not fail.",
        ),
    ] = False,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help="Where a leg fails, find the module: olmo-parity trace.")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write the whole record there.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML there.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary for a pull request there.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots there.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Instead of the nearest parity.toml.")] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Read no parity.toml.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of everything that takes part.")
    ] = False,
) -> None:
    """The gate: both frameworks on the same tokens. Exit 0 pass, 1 differ, 2 bad input, 3 inconclusive."""
    given = _given(context)
    if context.invoked_subcommand is not None:
        if given:
            options = ", ".join("--" + name.replace("_", "-") for name in sorted(given))
            raise BadInput(
                f"{options} belongs to the gate and would not reach {context.invoked_subcommand}: put it after"
            )
        return
    if version:
        from .parity.identity import versions

        for name, value in versions().items():
            typer.echo(f"{name} {value}")
        return
    from .parity import report, settings
    from .parity.run import run_gate

    found = settings.load(given.pop("config", None), given.pop("no_config", False))
    if not given and found.file is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    choice = settings.choose(given, found)
    report.prepare(choice.reports, choice.inputs)
    record = run_gate(choice.reference, choice.candidate, choice.options, say=_say)
    typer.echo(report.console(record))
    report.write_reports(record, **choice.reports)
    raise typer.Exit(record["exit_code"])


@parity_app.command()
def record(
    reference: Annotated[Path, typer.Argument(help="Hugging Face folder or hub id.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    batch: Annotated[Path | None, typer.Option(help='Prompts, one {"id", "text"} or {"id", "tokens"} a line.')] = None,
    only_batch: Annotated[bool, typer.Option("--only-batch", help="Leave the built-in sequences out.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts, and say so.")] = None,
    reference_device: Annotated[str | None, typer.Option(help="cpu or cuda: where torch runs.")] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
) -> None:
    """Keep the reference's logits in a folder, for olmo-parity --reference FOLDER where torch is not installed."""
    from .parity.options import GateOptions
    from .parity.recording import record_reference

    options = GateOptions(
        batch=batch,
        only_batch=only_batch,
        max_tokens=max_tokens,
        reference_device=reference_device,
        allow_unknown_keys=tuple(allow_unknown_key or ()),
    )
    kept = record_reference(reference, target, options, say=_say)
    tokens = sum(len(s["tokens"]) for s in kept["sequences"])
    typer.echo(f"{target}: {len(kept['sequences'])} sequences, {tokens} tokens, runs {', '.join(kept['runs'])}")


@parity_app.command()
def preflight(
    context: typer.Context,
    only: Annotated[
        list[str] | None,
        typer.Option(help="This stage alone. Repeatable. Known: weights, logits, step0, restore, loader, heldout."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going/--no-keep-going", help="Run the stages after one that failed too.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict/--no-strict", help="Exit 3 where a stage, or a part of one, was not run.")
    ] = False,
    reference: Annotated[Path | None, typer.Option(help="Hugging Face folder or hub id, or a record.")] = None,
    candidate: Annotated[Path | None, typer.Option(help="Orbax tree: what training will start from.")] = None,
    mesh: Annotated[str | None, typer.Option(help="fsdp=4,tensor=2: what training restores onto.")] = None,
    restart_mesh: Annotated[str | None, typer.Option(help="Of a restart; by default a quarter of the devices.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="What the weights came from, where that is not the reference.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the whole record there.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML there.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary for a pull request there.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Instead of the nearest parity.toml.")] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Read no parity.toml.")] = False,
) -> None:
    """Everything before a launch, stage by stage. Exit 0 pass, 1 fail, 2 bad input, 3 inconclusive."""
    from .parity import preflight_options, preflight_report, report, settings
    from .parity.preflight import run_preflight

    given = _given(context)
    found = settings.load(given.pop("config", None), given.pop("no_config", False))
    options, reports = preflight_options.choose(given, found)
    report.prepare(reports, options.inputs)
    record = run_preflight(options, say=_say)
    typer.echo(preflight_report.console(record))
    preflight_report.write_reports(record, **reports)
    raise typer.Exit(record["exit_code"])


@parity_app.command()
def trace(
    context: typer.Context,
    reference: Annotated[Path | None, typer.Option(help="Hugging Face folder: the side believed.")] = None,
    candidate: Annotated[Path | None, typer.Option(help="Orbax tree: the side tested.")] = None,
    candidate_fn: Annotated[
        str | None, typer.Option(help="package.module:function, which names its activations: docs/candidate-fn.md.")
    ] = None,
    batch: Annotated[Path | None, typer.Option(help='Prompts, one {"id", "text"} or {"id", "tokens"} a line.')] = None,
    only_batch: Annotated[
        bool, typer.Option("--only-batch/--no-only-batch", help="Leave the built-in sequences out.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts, and say so.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 for faults of function, bfloat16 for casts.")] = "float32",
    candidate_device: Annotated[str | None, typer.Option(help="cpu, gpu or tpu: where JAX runs.")] = None,
    override: Annotated[list[str] | None, typer.Option(help="KEY=VALUE in the config of both sides.")] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the whole record there.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Instead of the nearest parity.toml.")] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Read no parity.toml.")] = False,
) -> None:
    """The first module that diverges, and every module that is wrong by itself. Exit 0 none, 1 some, 2 bad input."""
    from .parity import report, settings, trace_report
    from .parity.trace_run import run_trace

    given = _given(context)
    given.pop("json", None)
    dtype = given.pop("dtype", dtype)
    found = settings.load(given.pop("config", None), given.pop("no_config", False))
    choice = settings.choose(given, found)
    report.prepare({"json": json}, choice.inputs)
    traced = run_trace(choice.reference, choice.candidate, choice.options, dtype, say=_say)
    typer.echo(trace_report.console(traced))
    if json:
        report.write(json, report.as_json(traced))
    raise typer.Exit(traced["exit_code"])


@parity_app.command("check-report")
def check_report(
    report: Annotated[Path, typer.Argument(help="What --json of the gate or of preflight wrote.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint about to be used.")],
    max_age: Annotated[str | None, typer.Option(help="Refuse an older report: 24h, 90m, 7d.")] = None,
) -> None:
    """Was this report a pass, for these very bytes? Exit 0 yes, 1 no, 2 one of the two cannot be read."""
    from .parity import check

    answer = check.check_report(report, target, max_age)
    typer.echo(answer.sentence)
    raise typer.Exit(answer.exit_code)


@parity_app.command()
def loader(
    context: typer.Context,
    function: Annotated[str | None, typer.Argument(help="package.module:function, see docs/loader.md.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That are simulated.")] = 4,
    workers: Annotated[int | None, typer.Option(min=0, help="Of each process, given to the function.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Batches of each process; by default a whole epoch.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Given to the function.")] = 0,
    resume_at: Annotated[
        int | None, typer.Option(min=0, help="Step of the restart; by default half of them, 0: none.")
    ] = None,
    other_processes: Annotated[int | None, typer.Option(min=1, help="Restart with so many too.")] = None,
    same_order: Annotated[
        bool,
        typer.Option("--same-order/--no-same-order", help="Every step must hold what a single process sees in it."),
    ] = False,
    patience: Annotated[float, typer.Option(min=0, help="Seconds without a batch after which it hangs.")] = 120,
    json: Annotated[Path | None, typer.Option(help="Write the whole record there.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Instead of the nearest parity.toml.")] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Read no parity.toml.")] = False,
) -> None:
    """The data loader: each record to one process, once an epoch, and after a restart? Exit 0 yes, 1 no, 3 not shown."""
    from .parity import loader as checking
    from .parity import report, settings, stage, stage_report

    given = _given(context)
    found = settings.load(given.pop("config", None), given.pop("no_config", False))
    report.prepare({"json": given.pop("json", None)}, [found.file])
    record = checking.run_loader(*checking.chosen(given, found.section(checking.SECTION, checking.KEYS)), say=_say)
    typer.echo(stage_report.console(record))
    if json:
        report.write(json, report.as_json(record))
    raise typer.Exit(stage.exit_code(record))


@parity_app.command()
def mutants(
    reference: Annotated[Path, typer.Option(help="Hugging Face folder.")],
    candidate: Annotated[
        Path | None, typer.Option(help="Orbax tree; by default the reference's weights, converted in memory.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="NAME, NAME@PLACE, a family, or a glob. Repeatable.")] = None,
    profile: Annotated[str, typer.Option(help="default, strict or published.")] = "default",
    limit: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: a limit set by hand.")] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Does the trace name the right module too?")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the whole record there.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there.")] = None,
) -> None:
    """Plant known faults in a right candidate and show which of them the gate catches. Exit 0 all that can show, 1 not all."""
    from .parity import report, settings
    from .parity.mutants import table
    from .parity.mutants.run import run_mutants

    report.prepare({"json": json, "markdown": markdown}, [reference, candidate])
    record = run_mutants(
        reference,
        candidate,
        only=tuple(only or ()),
        profile=profile,
        limits=settings.limits(limit or []),
        allow_unknown_keys=tuple(allow_unknown_key or ()),
        traced=trace,
        say=_say,
    )
    typer.echo(table.console(record))
    for path, text in ((json, report.as_json), (markdown, table.markdown)):
        if path is not None:
            report.write(path, text(record))
    raise typer.Exit(record["exit_code"])


@parity_app.command()
def heldout(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="Prompts as JSON lines, or token files (.npy).")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(help="REFERENCE=CANDIDATE: a Hugging Face folder and its Orbax tree. Repeatable."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Instead of pairs: a checkpoint, or a folder of steps.")
    ] = None,
    candidate: Annotated[Path | None, typer.Option(help="The same of the Orbax trees.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    tokens_dtype: Annotated[
        str | None, typer.Option(help="Of raw token files: uint16 or uint32; by default what the vocabulary shows.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row cut from a token file; by default 1024.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a token file, by default 32768; longer prompts are cut to it.")
    ] = None,
    loss_limit: Annotated[
        float | None, typer.Option(min=0, help="Of two training runs: the mean losses may differ by so much, nat.")
    ] = None,
    streamed: Annotated[
        bool | None, typer.Option("--streamed/--no-streamed", help="One layer in memory at a time.")
    ] = None,
    candidate_device: Annotated[str | None, typer.Option(help="cpu, gpu or tpu: where JAX runs.")] = None,
    reference_device: Annotated[str | None, typer.Option(help="cpu or cuda: where torch runs.")] = None,
    mesh: Annotated[str | None, typer.Option(help="fsdp=4,tensor=2: devices of the candidate.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Of the candidate, under jax.distributed.")] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the whole record there.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Instead of the nearest parity.toml.")] = None,
    no_config: Annotated[bool, typer.Option("--no-config", help="Read no parity.toml.")] = False,
) -> None:
    """Next-token loss of both sides on held-out text, step by step. Exit 0 pass, 1 differ, 2 bad input, 3 inconclusive."""
    from .parity import heldout as comparing
    from .parity import report, settings, stage, stage_report

    given = _given(context)
    found = settings.load(given.pop("config", None), given.pop("no_config", False))
    pairs, notes, options = comparing.from_settings(given, found)
    report.prepare({"json": given.pop("json", None)}, [*options.files, found.file])
    record = comparing.run_heldout(pairs, notes, options, say=_say)
    typer.echo(stage_report.console(record, comparing.table(record)))
    if json:
        report.write(json, report.as_json(record))
    raise typer.Exit(stage.exit_code(record))


@convert_app.command()
def hf2orbax(
    source: Annotated[str, typer.Argument(help="Hugging Face folder, or hub id: allenai/Olmo-3-1025-7B.")],
    target: Annotated[str, typer.Argument(help="Step folder to write, RUN/0 for instance.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, where SOURCE is a hub id.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Hold one shard of the hub on disk at a time, and keep none.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; kept as stored if not given.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back and compare every bit.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at TARGET.")] = False,
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help="Copy NaN and infinity too.")] = False,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    layout: Annotated[
        str, typer.Option(help="Of the tree: olmo_jax, maxtext (scanned layers) or maxtext-unscanned.")
    ] = "olmo_jax",
    compression: Annotated[str, typer.Option(help="none or zstd.")] = "none",
    chunk_bytes: Annotated[int | None, typer.Option(min=1, help="Largest chunk of an array on disk, bytes.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Tensors in work at once.")] = None,
    distributed: Annotated[
        str | None,
        typer.Option(help="One of several processes: INDEX/COUNT, or auto on TPU pods, GKE, Slurm, Open MPI."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Hugging Face to Orbax, bit for bit, in bounded memory. A killed run resumes when started again."""
    from .convert import hosts, hub, memory, pipeline, record

    memory.keep_freed_memory()
    options = {"chunk_bytes": chunk_bytes} if chunk_bytes else {}
    done = pipeline.hf2orbax(
        hub.with_revision(source, revision),
        target,
        stream=stream,
        dtype=dtype,
        verify=verify,
        overwrite=overwrite,
        allow_nonfinite=allow_nonfinite,
        allow_unknown_keys=allow_unknown_key or (),
        layout=layout,
        compression=compression,
        workers=workers,
        quiet=quiet,
        processes=hosts.which(distributed),
        **options,
    )
    typer.echo(record.summary(done))


@convert_app.command()
def core2orbax(
    source: Annotated[str, typer.Argument(help="Step folder of OLMo-core, its parent, or its model_and_optim.")],
    target: Annotated[str, typer.Argument(help="Step folder to write, RUN/0 for instance.")],
    vocabulary: Annotated[str, typer.Option(help="Padding rows of the vocabulary: cut, keep, or check.")] = "cut",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Bring Adam's moments along.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; kept as stored if not given.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back and compare every bit.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at TARGET.")] = False,
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help="Copy NaN and infinity too.")] = False,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    layout: Annotated[
        str, typer.Option(help="Of the tree: olmo_jax, maxtext (scanned layers) or maxtext-unscanned.")
    ] = "olmo_jax",
    compression: Annotated[str, typer.Option(help="none or zstd.")] = "none",
    chunk_bytes: Annotated[int | None, typer.Option(min=1, help="Largest chunk of an array on disk, bytes.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Tensors in work at once.")] = None,
    distributed: Annotated[
        str | None,
        typer.Option(help="One of several processes: INDEX/COUNT, or auto on TPU pods, GKE, Slurm, Open MPI."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """AI2's own distributed checkpoint to Orbax, without torch, without a hop through Hugging Face."""
    from .convert import hosts, memory, pipeline, record

    memory.keep_freed_memory()
    options = {"chunk_bytes": chunk_bytes} if chunk_bytes else {}
    done = pipeline.core2orbax(
        source,
        target,
        vocabulary=vocabulary,
        optimizer=optimizer,
        dtype=dtype,
        verify=verify,
        overwrite=overwrite,
        allow_nonfinite=allow_nonfinite,
        allow_unknown_keys=allow_unknown_key or (),
        layout=layout,
        compression=compression,
        workers=workers,
        quiet=quiet,
        processes=hosts.which(distributed),
        **options,
    )
    typer.echo(record.summary(done))


@convert_app.command()
def orbax2hf(
    source: Annotated[str, typer.Argument(help="Step folder, its parent, or the item.")],
    target: Annotated[str, typer.Argument(help="Hugging Face folder to write.")],
    transformers: Annotated[str, typer.Option(help="Releases that config.json must serve: both, 4 or 5.")] = "both",
    shard_bytes: Annotated[int | None, typer.Option(min=1, help="Largest safetensors file, bytes.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back and compare every bit.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at TARGET.")] = False,
    allow_nonfinite: Annotated[bool, typer.Option("--allow-nonfinite", help="Copy NaN and infinity too.")] = False,
    model_config: Annotated[
        str | None, typer.Option(help="config.json, or a folder with one, of a tree that has none (MaxText's own).")
    ] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Tensors in work at once.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Orbax back to safetensors, with a config.json that transformers 4.57 and 5.13+ read as the same function."""
    from .convert import export, memory, record

    memory.keep_freed_memory()
    options = {"shard_bytes": shard_bytes} if shard_bytes else {}
    done = export.orbax2hf(
        source,
        target,
        transformers=transformers,
        verify=verify,
        overwrite=overwrite,
        allow_nonfinite=allow_nonfinite,
        model_config=model_config,
        allow_unknown_keys=allow_unknown_key or (),
        workers=workers,
        quiet=quiet,
        **options,
    )
    typer.echo(record.summary(done))


@convert_app.command()
def verify(
    source: Annotated[str, typer.Argument(help="A checkpoint of any form; with --manifest the tree itself.")],
    target: Annotated[str | None, typer.Argument(help="The checkpoint that was made from it.")] = None,
    manifest: Annotated[bool, typer.Option("--manifest", help="Check one tree against its own manifest.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, where SOURCE is a hub id.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    model_config: Annotated[
        str | None, typer.Option(help="config.json, or a folder with one, of a tree that has none (MaxText's own).")
    ] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Read both again and compare every bit. Exit 0 equal, 1 different."""
    from .convert import hub, memory
    from .convert import verify as verifying

    if manifest == (target is not None):
        raise BadInput("name SOURCE and TARGET, or --manifest and one tree")
    if manifest and model_config:
        raise BadInput("--manifest looks at the tree alone, as it was written: leave --model-config out")
    source = hub.with_revision(source, revision)
    memory.keep_freed_memory()
    if manifest:
        result = verifying.verify_manifest(source, quiet=quiet)
    else:
        result = verifying.verify(
            source, target, model_config=model_config, allow_unknown_keys=allow_unknown_key or (), quiet=quiet
        )
    typer.echo(verifying.as_json(result) if json_output else verifying.as_text(result))
    raise typer.Exit(0 if result.equal else 1)


@convert_app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint of any form.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of A, where that is a hub id; of both: A@REVISION B@REVISION."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Every tensor, not only the 30 that moved most.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    model_config: Annotated[
        str | None, typer.Option(help="config.json, or a folder with one, of a tree that has none (MaxText's own).")
    ] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """How far two checkpoints are apart, tensor by tensor, most moved first. Exit 0 equal, 1 different."""
    import json

    from .convert import diff as differ
    from .convert import hub, memory

    memory.keep_freed_memory()
    found = differ.diff(
        hub.with_revision(a, revision),
        b,
        model_config=model_config,
        allow_unknown_keys=allow_unknown_key or (),
        quiet=quiet,
    )
    limit = None if show_all else 30
    typer.echo(json.dumps(found.as_json(), indent=1) if json_output else differ.as_text(found, limit))
    raise typer.Exit(0 if found.equal else 1)


@convert_app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint of any form.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, where PATH is a hub id.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    model_config: Annotated[
        str | None, typer.Option(help="config.json, or a folder with one, of a tree that has none (MaxText's own).")
    ] = None,
    allow_unknown_key: Annotated[list[str] | None, typer.Option(help="Let this config key through unread.")] = None,
) -> None:
    """Config, resolved rotary embedding per layer type, and tensors, from metadata alone."""
    import json

    from .convert import describe, hub

    found = describe.inspect(hub.with_revision(path, revision), allow_unknown_key or (), model_config=model_config)
    typer.echo(json.dumps(found.as_json(), indent=1) if json_output else describe.as_text(found))
    raise typer.Exit(2 if found.source.faults else 0)


def _given(context: typer.Context) -> dict:
    """The options that stand on the command line."""
    return {n: v for n, v in context.params.items() if context.get_parameter_source(n).name == "COMMANDLINE"}


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def convert_main() -> NoReturn:
    """Entry point of olmo-convert."""
    _run(convert_app)


def parity_main() -> NoReturn:
    """Entry point of olmo-parity."""
    from .parity.children import end_in_order

    end_in_order()
    _run(parity_app)


def _run(app: typer.Typer) -> NoReturn:
    """Run an app so that bad input ends in a sentence and exit code 2, never in a traceback.

    Exit code 1 is kept for "the two sides differ": neither a crash nor a reader that went away must read as that.
    """
    _open_streams()
    try:
        app(standalone_mode=True)
    except SystemExit as exit:
        if isinstance(exit.__context__, BrokenPipeError):  # `| head`: the app says 1
            sys.exit(141)  # what a shell says of any program that a closed pipe ended
        raise
    except BadInput as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        sys.exit(_fail(f"{error.filename or 'the file system'}: {error.strerror or error}"))
    except Exception:
        traceback.print_exc()
        sys.exit(_fail("this is a fault of olmo-parity itself, and no verdict; please report it with the lines above"))
    sys.exit(0)


def _open_streams() -> None:
    """Standard streams that were closed lead nowhere: a data file that got their number would take the log lines."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files and tensors may be no valid text


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 2
