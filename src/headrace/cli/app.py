"""The commands, and how every failure leaves: one `error:` line, an exit code, and a traceback only with --debug.

Nothing heavy is imported here. A command is declared in one short function that imports the module with its work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli import reference, terminal
from headrace.cli.options import (
    Fast,
    FlagsCommand,
    HostMemory,
    OffloadFlags,
    PassingCommand,
    TrustRemoteCode,
    with_offload_flags,
)
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Run language models that are larger than memory by streaming their weights.",
    add_completion=False,
    rich_markup_mode=None,  # rich is loaded by the commands that draw with it
)


@app.command(cls=PassingCommand, short_help="Tell what a set of offload flags does.")
@with_offload_flags
def check(
    offload: OffloadFlags,
    line: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- vllm serve MODEL ...]", help="A whole command line of vLLM, to look through."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With a command line: the GPU that it is meant for, like l40s."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With a command line: what the host may use.")
    ] = None,
    machine_file: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="With a command line: the machine that it is meant for."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> int:
    """Tell what a set of offload flags does, or what is wrong with it; or what a command line of vLLM would do.

    Loads no model. Exit code 1 says that the command line will not do what it was written for.
    """
    from headrace.cli import check as command

    if line:
        return command.check_line(
            line, offload, device=device, host_memory=host_memory, machine=machine_file, as_json=as_json
        )
    command.refuse_without_line(device=device, host_memory=host_memory, machine=machine_file)
    command.check_flags(offload, as_json=as_json)
    return 0


@app.command(cls=FlagsCommand, short_help="Answer a prompt, or chat.")
@with_offload_flags
def run(
    offload: OffloadFlags,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory with safetensors, a .gguf file, or a hub id (org/name)."),
    ],
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The question. Without it: standard input, or a chat in a terminal."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="The longest answer, in tokens; default: 256, or what the context leaves."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="0 takes the likeliest token each time; default: the model's own setting."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Sample only from the likeliest tokens that have this share of the probability."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Sample the same answer again with the same N.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget of the whole process, like 3GiB, or of the device with --device; default: 90 % of what is "
            "free.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where to compute: cpu (default), cuda or cuda:1.")
    ] = None,
    host_memory: HostMemory = None,
    pin_memory: Annotated[
        bool,
        typer.Option(
            "--pin-memory/--no-pin-memory",
            help="With --device: page-lock host memory. Not useful where host and device have one memory.",
        ),
    ] = True,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens (prompts and answers) that memory is planned for; default: the prompt and --max-tokens; in a "
            "chat 2048, or twice --max-tokens if that is more, or all that the model allows if that is less.",
        ),
    ] = None,
    speculate: Annotated[
        str,
        typer.Option(
            metavar="auto|lookup|MODEL|off",
            help="Verify drafts of several tokens in a pass: lookup repeats what followed the same words before, MODEL "
            "is a smaller one that drafts; default: lookup where a pass waits for weights and answers are not sampled.",
        ),
    ] = "auto",
    batch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Answer a file of requests together: a line is {"prompt": ...} or {"messages": [...]}, with "id" and '
            '"max_tokens" where wanted, or a line of OpenAI\'s batches. Run again, it goes on where it was.',
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT.jsonl", help="With --batch: a line per answer, as they finish."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --batch: answer so many at a time; default: as memory and speed allow."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every figure, last.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write reads, waits and layer runs there as Chrome trace events (for Perfetto)."
        ),
    ] = None,
    fast: Fast = False,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the answer and nothing else.")] = False,
) -> int:
    """Answer a prompt, or chat, with a model that need not fit into memory."""
    from headrace.cli import run as command

    options = command.RunOptions(
        model=model,
        prompt=prompt,
        raw=raw,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        memory=memory,
        device=device,
        host_memory=host_memory,
        pin_memory=pin_memory,
        context=context,
        speculate=speculate,
        batch=batch,
        output=output,
        batch_size=batch_size,
        as_json=as_json,
        trace=trace,
        fast=fast,
        trust_remote_code=trust_remote_code,
        quiet=quiet,
    )
    options.check()
    return command.run(options, offload.config())


@app.command(cls=FlagsCommand, short_help="Serve a model over HTTP, as OpenAI's API.")
@with_offload_flags
def serve(
    offload: OffloadFlags,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory with safetensors, a .gguf file, or a hub id (org/name)."),
    ],
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Budget of the whole process, like 3GiB; default: 90 % of what is free."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen there; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes any port that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="HEADRACE_API_KEY", help="Refuse requests without this key."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What requests call the model; default: the last part of MODEL.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of a request, prompt and answer; default: 2048, or what the model allows."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(metavar="N", help="Requests that share a pass; the KV cache has room for all of them.")
    ] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of one pass, prompts included.")
    ] = 1024,
    block_size: Annotated[int, typer.Option(metavar="N", help="Tokens of one block of the KV cache.")] = 16,
    num_gpu_blocks_override: Annotated[
        int | None,
        typer.Option(metavar="N", help="Blocks of the KV cache, if not room for all requests: then they wait."),
    ] = None,
    kv_offload_gb: Annotated[
        float, typer.Option("--kv-offload-gb", metavar="GIB", help="Host memory for KV cache; needs an accelerator.")
    ] = 0.0,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", help="Requests that may wait; any more are told to come back later.")
    ] = 256,
    max_request_size: Annotated[str, typer.Option(metavar="SIZE", help="The largest request body.")] = "1MiB",
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for running requests after the first signal to stop.")
    ] = 30.0,
    enable_log_requests: Annotated[
        bool, typer.Option("--enable-log-requests", help="Log what requests say, which is never done otherwise.")
    ] = False,
    fast: Fast = False,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Serve a model that need not fit into memory. Requests that run at once share each pass over its weights."""
    from headrace.cli.serve import serve as command
    from headrace.server.options import ServeOptions

    options = ServeOptions(
        model=model,
        memory=memory,
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_offload_gb=kv_offload_gb,
        max_waiting=max_waiting,
        max_request_size=max_request_size,
        drain_timeout=drain_timeout,
        enable_log_requests=enable_log_requests,
        fast=fast,
        trust_remote_code=trust_remote_code,
    )
    options.check()
    return command(options, offload.config())


@app.command(short_help="See a real model answer in half its memory.")
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every figure, last.")] = False,
) -> int:
    """Run a small real model with half of its weights in memory, and show that its tokens are the same."""
    from headrace.cli.demo import demo as command

    return command(as_json=as_json)


@app.command(cls=FlagsCommand, short_help="Plan before anything is loaded: memory, speed, settings.")
@with_offload_flags
def plan(
    offload: OffloadFlags,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory with a checkpoint, only a config.json, a .gguf file, or a hub id."
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget of the whole process, or of the device with --device; default: 90 % of what is free.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu (default), cuda:0, or a GPU by its data sheet, like l40s or rtx-4090."),
    ] = None,
    host_memory: HostMemory = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a prompt and its answer; default: 2048.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences at once.")] = 1,
    engine: Annotated[
        str | None,
        typer.Option("--for", metavar="vllm|sglang", help="Give the command line to run there instead."),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="With --for: GPUs to divide the model among.")] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="With --for: part of each GPU's memory that may be filled.")
    ] = 0.9,
    machine_file: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="Plan for the machine of a file that `headrace machine` wrote."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw speed over memory, and where the bytes lie, to FILE (needs headrace[plot])."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every figure.")] = False,
    fast: Fast = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Tell what a model would take and how fast it would be, before anything is loaded."""
    from headrace.cli import plan as command

    options = command.PlanOptions(
        model=model,
        memory=memory,
        device=device,
        host_memory=host_memory,
        context=context,
        batch=batch,
        machine=machine_file,
        plot=plot,
        engine=engine,
        gpus=gpus,
        utilization=gpu_memory_utilization,
        as_json=as_json,
        fast=fast,
        trust_remote_code=trust_remote_code,
    )
    command.plan(options, offload.config())


@app.command(short_help="Write a model with 8 or 4 bits for each weight.")
def quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory with safetensors, a .gguf file, or a hub id (org/name)."),
    ],
    output: Annotated[Path, typer.Argument(metavar="NEW", help="The directory to write; it must be new, or empty.")],
    bits: Annotated[
        int | None,
        typer.Option(metavar="8|4", help="Of each weight in the layers; default: 8, and of a .gguf file what it has."),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With 4 bits: so many weights share a scale (32, 64, 128 or 256); default: 64, .gguf: 32."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="With 4 bits: let the original read a text first, and round where it hurts least. A .gguf file and "
            "what others have quantized are not calibrated.",
        ),
    ] = True,
    damage: Annotated[
        bool | None,
        typer.Option(
            "--damage/--no-damage",
            help="Run both on a text and print what was lost; default: yes, but not for a .gguf file, which would be "
            "imported for it.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Budget of the process while a model runs; default: 90 % of what is free."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every figure, last.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Write a model with 8 or 4 bits for each weight, layer by layer, and tell what that costs.

    NEW loads like any other model, and streams half or a quarter of the bytes.
    """
    from headrace.cli.quantize import QuantizeOptions
    from headrace.cli.quantize import quantize as command

    return command(
        QuantizeOptions(
            model=model,
            output=output,
            bits=bits,
            group_size=group_size,
            calibrate=calibrate,
            damage=damage,
            memory=memory,
            as_json=as_json,
            trust_remote_code=trust_remote_code,
        )
    )


@app.command(short_help="Measure this machine, for plans.")
def machine(
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure the disk by reading this large file; default: one written for it."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result there instead of into the cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Measure disk, memory, processor and accelerator in a few seconds, and keep the result for `headrace plan`."""
    from headrace.cli.machine import machine as command

    command(file=file, output=output, as_json=as_json)


@app.command(short_help="Measure Headrace beside its peers under one memory cap.")
def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="llama-3b, llama-1b or qwen3-4b (random weights in these shapes, made once), smollm2, or a directory.",
        ),
    ] = "llama-3b",
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE|none", help="The cap that each runs under; default: less than the model's weights."),
    ] = None,
    bits: Annotated[
        int, typer.Option(metavar="16|8|4", help="Of each weight; with llama.cpp BF16, Q8_0 or Q4_0 files.")
    ] = 16,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only these, one --peers for each (headrace: none); default: all that are installed."
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PYTHON", help="A peer that is installed for another Python, like vllm=PATH."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Each candidate runs so often, in turn.")] = 3,
    tokens: Annotated[int, typer.Option(metavar="N", help="That each decodes after the first one.")] = 6,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one run of one candidate.")] = 900.0,
    gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What llama.cpp loads; default: the model, converted."),
    ] = None,
    directory: Annotated[Path, typer.Option(metavar="DIR", help="Where models are made and kept: some GiB.")] = Path(
        "/var/tmp/headrace-bench"
    ),
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.json", help="Write every run's figures there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw a chart there (needs headrace[plot]).")
    ] = None,
    show: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.json", help="Measure nothing: compare what --output wrote, if caps and models are the same."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every figure, last.")] = False,
) -> int:
    """Measure time and bytes per token of Headrace and the peers that are installed, in turn, under one memory cap.

    Each runs in a process of its own with a cold page cache. Needs root on Linux, for memory control groups.
    """
    from headrace.cli import bench as command

    options = command.BenchOptions(
        model=model,
        memory=memory,
        bits=bits,
        peers=peers or (),
        peer_python=peer_python or (),
        rounds=rounds,
        tokens=tokens,
        timeout=timeout,
        gguf=gguf,
        directory=directory,
        output=output,
        plot=plot,
        show=show or (),
        as_json=as_json,
    )
    options.check()
    return command.bench(options)


@app.command(short_help="Explain an error: its condition, its place and a fix.")
def explain(
    message: Annotated[
        list[str] | None,
        typer.Argument(metavar="MESSAGE", help="The error's text, or its id. Without it: standard input."),
    ] = None,
    package: Annotated[
        str | None,
        typer.Option(metavar="PACKAGE", help="Whose error it is; default: as the traceback tells, or every one built."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="The command line that failed, in quotes: it is shown corrected."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    short: Annotated[bool, typer.Option("--short", help="Print one line: the condition and a fix.")] = False,
) -> int:
    """Explain a message, a traceback or a log: what was checked, where, and what to change. 1 if nothing is claimed."""
    from headrace.cli.explain import explain_command

    return explain_command(message or [], package=package, command=command, as_json=as_json, short=short)


app.add_typer(reference.app, name="reference", short_help="Build and search the error reference of a package.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (at any place).")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    terminal.repair_streams()
    arguments, debug = _without_debug(sys.argv[1:] if argv is None else argv)
    try:
        with terminal.notice_interrupts():
            code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read our output has gone. What is still buffered must not fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.TyperException as error:
        return _fail(f"{error.format_message()}\nSee `headrace --help` or `headrace COMMAND --help`.", 2, debug)
    except HeadraceError as error:
        return _fail(f"{error.message}\nheadrace explain {error.error_id()}", error.exit_code, debug)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}\nThis was not expected; run again with --debug.", 1, debug)
    return code


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    result = command.main(args=arguments, prog_name="headrace", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """--debug means the same before and after the command, so it is taken out before typer looks."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [token for token in argv[:end] if token != "--debug"] + list(argv[end:]), "--debug" in argv[:end]


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    if terminal.interrupted.is_set():
        return 130
    typer.echo(f"error: {message}", err=True)
    return code
