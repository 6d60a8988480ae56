"""What do requests and quality pay when a load outgrows the memory, at fixed and at paged bits?

    pagedweight bench pressure OUT --memory 20MiB -- --block-size 32 --max-model-len 512

A load that rises and falls is sent to real servers, one after the other, that serve the same
checkpoint in the same budget: fixed bits (the KV cache gets the rest) and paged. Every answer must
be whole. Order changes from repeat to repeat, since a machine is not always equally quick.
Everything after `--` goes to vLLM. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagedweight.bench.client import Answer, ask_all, check_clock
from pagedweight.bench.load import Ask, Load, Phase, draw, parse_lengths, python_topics
from pagedweight.bench.outcome import Outcome, outcome
from pagedweight.bench.service import serve
from pagedweight.calibrate.text import read_text, tokenize
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline
from pagedweight.serving.options import parse_bytes

PHASES = ("calm:6:1", "burst:6:16", "calm:10:1")
POLICIES = ("static6", "static4", "static3", "paged")
PREEMPTIONS = "vllm:num_preemptions_total"
WARM_UP = Load((Phase("warm-up", 4.0, 1.5),), (64, 64), (16, 16), seed=1)
SETTLE_SECONDS = 2.0
CHANGES_SPEED = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ATTENTION_BACKEND")


@dataclass(frozen=True)
class Trial:
    """What all runs have in common. policy: file for paged; vllm: flags of vLLM; trace: paged
    writes down which rows had which bits."""

    checkpoint: Path
    memory: int
    load: Load
    peak: str
    asks: tuple[Ask, ...]
    warm_up: tuple[Ask, ...]
    policy: Path | None
    vllm: tuple[str, ...]
    folder: Path
    trace: bool = False

    def path(self, name: str, number: int, suffix: str) -> Path:
        """Where a run of the policy `name` writes."""
        return self.folder / f"{name}-{number}{suffix}"


@dataclass(frozen=True)
class Run:
    """One server under the load: what it did, every answer, and its timeline."""

    name: str
    start_seconds: float
    outcome: Outcome
    answers: tuple[Answer, ...]
    timeline: Timeline


def flags_of(name: str, trial: Trial, number: int = 0) -> list[str]:
    """Flags of `pagedweight serve` for "paged" or "staticB". Raises UserError."""
    timeline = trial.path(name, number, ".jsonl")
    flags = ["--memory", str(trial.memory), "--timeline", str(timeline)]
    if name == "paged":
        policy = ["--policy", str(trial.policy)] if trial.policy else []
        trace = ["--trace", str(trial.path(name, number, ".trace"))] if trial.trace else []
        return [*flags, *policy, *trace]
    if name.startswith("static") and name[6:].isdigit():
        return [*flags, "--bits", name[6:]]
    raise UserError(f"policy {name!r} is neither paged nor static and a number, as static6")


def run(name: str, trial: Trial, number: int = 0) -> Run:
    """Start a server, warm it up, send the load, let it settle, end it. Raises UserError."""
    log = trial.path(name, number, ".log")
    with serve(trial.checkpoint, log, flags_of(name, trial, number), trial.vllm) as service:
        ask_all(service.url, trial.checkpoint, trial.warm_up)
        before = service.counter(PREEMPTIONS)
        answers = ask_all(service.url, trial.checkpoint, trial.asks)
        time.sleep(SETTLE_SECONDS)
        preemptions = int(service.counter(PREEMPTIONS) - before)
    timeline = Timeline.load(trial.path(name, number, ".jsonl"))
    found = outcome(trial.load, trial.peak, answers, timeline, preemptions)
    return Run(name, round(service.start_seconds, 1), found, tuple(answers), timeline)


def run_all(
    trial: Trial, names: Sequence[str], repeats: int, told: Callable[[Run], None]
) -> list[Run]:
    """Every policy `repeats` times, in turned order; `told` hears of each."""
    runs = []
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in [*names[shift:], *names[:shift]]:
            runs.append(run(name, trial, repeat))
            told(runs[-1])
    return runs


def record(trial: Trial, runs: Sequence[Run], command: Sequence[str]) -> dict[str, Any]:
    """The result as JSON; names neither host nor folder."""
    from pagedweight.bench.record import machine

    load = trial.load
    return {
        "question": "cost of a load that outgrows the memory, at fixed and at paged bits",
        "command": shlex.join(command),
        "environment": {n: v for n, v in os.environ.items() if n in CHANGES_SPEED},
        "machine": machine() | {"load_after": round(os.getloadavg()[0], 1)},
        "checkpoint": trial.checkpoint.name,
        "memory_bytes": trial.memory,
        "load": {
            "seed": load.seed,
            "phases": [asdict(phase) for phase in load.phases],
            "prompt_tokens": load.prompt,
            "output_tokens": load.output,
            "requests": len(trial.asks),
            "tokens_asked": sum(ask.output for ask in trial.asks),
        },
        "units": "latencies in ms, bits by weight, damage in units of sensitivity",
        "rows": [
            {"policy": run.name, "start_s": run.start_seconds, **asdict(run.outcome)}
            for run in runs
        ],
    }


HEAD = (
    f"{'policy':9}{'lost':>6}{'preempted':>11}{'bits':>7}{'lowest':>8}{'tokens/s':>10}"
    f"{'in peak':>9}{'TTFT p50':>10}{'p99':>8}{'ITL p50':>9}{'p99':>7}{'bits back':>11}"
)


def line(run: Run) -> str:
    """A run as a line under HEAD."""
    of = run.outcome
    back = "never" if of.bits_back_s is None else f"{of.bits_back_s:.1f} s"
    return (
        f"{run.name:9}{of.lost:6}{of.preemptions:11}{of.mean_bits:7.2f}{of.lowest_bits:8.2f}"
        f"{of.tokens_per_s:10.0f}{of.peak_tokens_per_s:9.0f}{of.all.ttft_p50:10.0f}"
        f"{of.all.ttft_p99:8.0f}{of.all.itl_p50:9.0f}{of.all.itl_p99:7.0f}{back:>11}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagedweight bench pressure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="OUT", help="a quantized checkpoint")
    add("--memory", required=True, help="for routed experts and KV cache together")
    add("--policies", nargs="+", default=POLICIES, help=f"default: {' '.join(POLICIES)}")
    add("--policy", type=Path, help="policy file of paged")
    add("--phases", nargs="+", default=PHASES, help="NAME:SECONDS:RATE[:PROMPT[:OUTPUT]]")
    add("--peak", default="burst", help="the phase that is measured by itself")
    add("--prompt-tokens", default="96-256")
    add("--output-tokens", default="128-256")
    add("--text", help="where prompts come from (default: the texts of Python's help())")
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=1)
    add("--keep", type=Path, help="folder for timelines and logs (default: they go)")
    add("--output", type=Path, default=Path("benchmarks/results/pressure_cpu.json"))
    return parser


def trial_of(options: argparse.Namespace, vllm: Sequence[str], folder: Path) -> Trial:
    """Check the options and draw the load. Raises UserError."""
    try:
        lengths = [parse_lengths(t) for t in (options.prompt_tokens, options.output_tokens)]
    except ValueError:
        raise UserError("--prompt-tokens and --output-tokens are ranges such as 64-192") from None
    load = Load(tuple(Phase.parse(text) for text in options.phases), *lengths, options.seed)
    load.span(options.peak)
    text = read_text(options.text)[0] if options.text else python_topics()
    stream, _ = tokenize(text, options.checkpoint)
    trial = Trial(
        options.checkpoint,
        parse_bytes(options.memory),
        load,
        options.peak,
        tuple(draw(load, stream)),
        tuple(draw(WARM_UP, stream)),
        options.policy,
        tuple(vllm),
        folder,
    )
    for name in options.policies:
        flags_of(name, trial)
    return trial


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    check_clock()
    if options.repeats < 1:
        raise UserError(f"--repeats is {options.repeats}; give at least 1")
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        trial = trial_of(options, given[split + 1 :], kept)
        print(f"{len(trial.asks)} requests in {trial.load.seconds:.0f} s\n{HEAD}", flush=True)
        runs = run_all(
            trial, options.policies, options.repeats, lambda r: print(line(r), flush=True)
        )
    from pagedweight.bench.record import write_record

    own = [Path(word).name if word.startswith("/") else word for word in given]
    shown = ["pagedweight", "bench", "pressure", *own]
    write_record(options.output, record(trial, runs, shown))
    lost = [run.name for run in runs if run.outcome.lost]
    if lost:
        faults = {a.fault for run in runs for a in run.answers if a.fault}
        sys.exit(f"requests were lost by {json.dumps(lost)}: {sorted(faults)[:3]}")


if __name__ == "__main__":
    main()
