"""What do requests and quality pay when a load outgrows the memory, at fixed and at paged bits?

    pagedweight bench pressure OUT --memory 20MiB -- --block-size 32 --max-model-len 512
    pagedweight bench pressure OUT --gpu-memory 24GiB --together 3 --policies paged static3 bf16

A load that rises and falls is sent to real servers, one after the other, that serve the same
checkpoint in the same budget: fixed bits (the KV cache gets the rest) and paged; vLLM's own models
of the same shape beside them. Every answer must be whole. Order changes from repeat to repeat,
since a machine is not always equally quick. Everything after `--` goes to vLLM. Writes JSON.

A checkpoint without a tokenizer (`bench synthetic`) is asked in random tokens, and tokens are
sampled at temperature 1: a random model that repeats one token would route all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight.bench.arguments import positive_float
from pagedweight.bench.client import Answer, ask_all, check_clock, has_tokenizer
from pagedweight.bench.contestants import Budget, budget_of, check_name, own_flags, peer
from pagedweight.bench.decode import PEERS
from pagedweight.bench.load import Ask, Load, Phase, draw, parse_lengths, python_topics
from pagedweight.bench.outcome import BACK, Outcome, outcome
from pagedweight.bench.reference_damage import beside_reference, damage_of_levels
from pagedweight.bench.service import START_SECONDS, Server, Service, own_command
from pagedweight.calibrate.text import read_text, tokenize
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline, TimelineWriter
from pagedweight.serving.options import parse_bytes

PHASES = ("calm:6:1", "burst:6:16", "calm:10:1")
POLICIES = ("static6", "static4", "static3", "paged")
PREEMPTIONS = "vllm:num_preemptions_total"
WARM_UP = Load((Phase("warm-up", 1.5, 8.0),), (64, 256), (16, 16), seed=1)
SETTLE_SECONDS, MOST_SETTLE_SECONDS = 2.0, 12.0
"""After the load: always, and while bits are not back."""
CHANGES_SPEED = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ATTENTION_BACKEND")
RANDOM_TOKENS = 1 << 16
BARE = ("--skip-tokenizer-init", "--load-format", "dummy")
"""For random weights: no text, and what is no routed expert alike in all, as vLLM fills it."""


@dataclass(frozen=True)
class Trial:
    """What all runs have in common. policy: file for paged; vllm: flags of vLLM; trace: paged
    writes down which rows had which bits. start_seconds: what a server has to come up."""

    checkpoint: Path
    budget: Budget
    load: Load
    peak: str
    asks: tuple[Ask, ...]
    warm_up: tuple[Ask, ...]
    policy: Path | None
    vllm: tuple[str, ...]
    folder: Path
    trace: bool = False
    start_seconds: float = START_SECONDS

    def path(self, name: str, number: int, suffix: str) -> Path:
        """Where a run of the policy `name` writes."""
        return self.folder / f"{name}-{number}{suffix}"


@dataclass(frozen=True)
class Run:
    """One server under the load: what it did, every answer, and its timeline (vLLM's own models
    have none)."""

    name: str
    start_seconds: float
    outcome: Outcome
    answers: tuple[Answer, ...]
    timeline: Timeline | None


def command_of(name: str, trial: Trial, number: int = 0) -> list[str]:
    """What starts the server of a policy. Raises UserError."""
    check_name(name)
    bare = () if has_tokenizer(trial.checkpoint) else BARE
    if name in PEERS:
        flags = [*bare[:1], *trial.vllm]
        return peer(name, trial.checkpoint, trial.budget, trial.folder, flags)
    trace = trial.path(name, number, ".trace") if trial.trace else None
    timeline = trial.path(name, number, ".jsonl")
    flags = own_flags(name, trial.budget, timeline, trial.policy, trace)
    return own_command(trial.checkpoint, flags, [*bare, *trial.vllm])


def run(name: str, trial: Trial, number: int = 0) -> Run:
    """Start a server, warm it up, send the load, let it settle, end it. Raises UserError."""
    server = Server(command_of(name, trial, number), trial.path(name, number, ".log"))
    try:
        service = server.ready(trial.start_seconds)
        _ask(service, name, trial, trial.warm_up)
        answers, preemptions = _measure(service, name, trial, number)
    finally:
        server.end()
    return _run_of(name, trial, number, service, answers, preemptions)


def _ask(service: Service, name: str, trial: Trial, asks: Sequence[Ask]) -> list[Answer]:
    model = trial.folder / name if name in PEERS else trial.checkpoint
    temperature = 0.0 if has_tokenizer(trial.checkpoint) else 1.0
    return ask_all(service.url, model, asks, temperature)


def _measure(service: Service, name: str, trial: Trial, number: int) -> tuple[list[Answer], int]:
    """Answers to the load, and how many requests vLLM preempted."""
    before = service.counter(PREEMPTIONS)
    answers = _ask(service, name, trial, trial.asks)
    end = time.monotonic() + MOST_SETTLE_SECONDS
    time.sleep(SETTLE_SECONDS)
    while name == "paged" and time.monotonic() < end:
        bits = Timeline.load(trial.path(name, number, ".jsonl")).column("bits")
        if bits[-1] >= bits[0] - BACK:
            break
        time.sleep(0.5)
    return answers, int(service.counter(PREEMPTIONS) - before)


def _run_of(
    name: str,
    trial: Trial,
    number: int,
    service: Service,
    answers: list[Answer],
    preemptions: int,
) -> Run:
    timeline = None if name in PEERS else Timeline.load(trial.path(name, number, ".jsonl"))
    found = outcome(trial.load, trial.peak, answers, timeline, preemptions)
    if timeline is not None:
        begin = answers[0].sent - answers[0].ask.at
        write_from(timeline, begin, trial.path(name, number, ".load.jsonl"))
    return Run(name, round(service.start_seconds, 1), found, tuple(answers), timeline)


def write_from(timeline: Timeline, begin: float, path: Path) -> None:
    """A timeline of the load alone, for pictures: what the server did since the monotonic time
    `begin`, and how it stood before. Its own file begins with the warm-up, long before where
    other servers were measured in between."""
    before = int(np.searchsorted(timeline.column("monotonic"), begin, side="right")) - 1
    writer = TimelineWriter(path, timeline.header)
    for sample in timeline.samples[max(0, before) :]:
        writer.write(sample)
    writer.close()


def run_together(names: Sequence[str], trial: Trial, number: int = 0) -> Iterator[Run]:
    """Start the servers of `names` side by side, then send the load to one after the other while
    the rest stand still. A server that fails is said to have, and the others go on."""
    with ExitStack() as stack:
        servers = {}
        for name in names:
            log = trial.path(name, number, ".log")
            servers[name] = Server(command_of(name, trial, number), log)
            stack.callback(servers[name].end)
        stack.callback(_stop_all, [*servers.values()])  # first, so that they end side by side
        ready = {}
        for name, server in servers.items():
            try:
                ready[name] = server.ready(trial.start_seconds)
                _ask(ready[name], name, trial, trial.warm_up)
            except UserError as error:
                ready.pop(name, None)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        for name, service in ready.items():
            try:
                answers, preemptions = _measure(service, name, trial, number)
                done = _run_of(name, trial, number, service, answers, preemptions)
            except (UserError, OSError, ValueError) as error:  # it ended, or answered nothing
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            yield done


def _stop_all(servers: Sequence[Server]) -> None:
    for server in servers:
        server.stop()


def run_all(
    trial: Trial,
    names: Sequence[str],
    repeats: int,
    told: Callable[[Run], None],
    together: int = 1,
) -> list[Run]:
    """Every policy `repeats` times, in turned order; `told` hears of each."""
    runs = []
    for repeat in range(repeats):
        shift = repeat % len(names)
        turned = [*names[shift:], *names[:shift]]
        for first in range(0, len(turned), together):
            part = turned[first : first + together]
            found = run_together(part, trial, repeat) if together > 1 else None
            for done in found or (run(name, trial, repeat) for name in part):
                runs.append(done)
                told(done)
    return runs


def _beside_reference(run: Run, damage: Mapping[int, float]) -> dict[str, float | None]:
    return beside_reference(run.outcome, run.timeline, damage) if run.name == "paged" else {}


def record(
    trial: Trial, runs: Sequence[Run], command: Sequence[str], damage: Mapping[int, float]
) -> dict[str, Any]:
    """The result as JSON; names neither host nor folder. damage: `damage_of_levels`."""
    from pagedweight.bench.record import machine

    load = trial.load
    return {
        "question": "cost of a load that outgrows the memory, at fixed and at paged bits",
        "command": shlex.join(command),
        "environment": {n: v for n, v in os.environ.items() if n in CHANGES_SPEED},
        "machine": machine() | {"load_after": round(os.getloadavg()[0], 1)},
        "checkpoint": trial.checkpoint.name,
        "memory_bytes": trial.budget.memory,
        "gpu_memory_bytes": trial.budget.gpu or None,
        "gpu_reserve_bytes": trial.budget.reserve,
        "load": {
            "seed": load.seed,
            "phases": [asdict(phase) for phase in load.phases],
            "prompt_tokens": load.prompt,
            "output_tokens": load.output,
            "requests": len(trial.asks),
            "tokens_asked": sum(ask.output for ask in trial.asks),
        },
        "damage_of_static": {str(bits): value for bits, value in damage.items()},
        "units": "latencies in ms, bits by weight, damage in units of sensitivity",
        "rows": [
            {
                "policy": run.name,
                "start_s": run.start_seconds,
                **asdict(run.outcome),
                **_beside_reference(run, damage),
            }
            for run in runs
        ],
    }


def not_measured(asked: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Policies without a run: their servers did not come up, ended, or have not had their turn."""
    return [name for name in asked if name not in {run.name for run in runs}]


HEAD = (
    f"{'policy':12}{'lost':>6}{'preempted':>11}{'bits':>7}{'lowest':>8}{'tokens/s':>10}"
    f"{'in peak':>9}{'TTFT p50':>10}{'p99':>8}{'ITL p50':>9}{'p99':>7}{'bits back':>11}"
)


def line(run: Run) -> str:
    """A run as a line under HEAD."""
    of = run.outcome
    bits, back = f"{'-':>7}{'-':>8}", "-"
    if run.timeline is not None:
        bits = f"{of.mean_bits:7.2f}{of.lowest_bits:8.2f}"
        back = "not yet" if of.bits_back_s is None else f"{of.bits_back_s:.1f} s"
    return (
        f"{run.name:12}{of.lost:6}{of.preemptions:11}{bits}"
        f"{of.tokens_per_s:10.0f}{of.peak_tokens_per_s:9.0f}{of.all.ttft_p50:10.0f}"
        f"{of.all.ttft_p99:8.0f}{of.all.itl_p50:9.1f}{of.all.itl_p99:7.1f}{back:>11}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagedweight bench pressure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="OUT", help="a quantized checkpoint")
    add("--memory", help="for routed experts and KV cache together")
    add("--gpu-memory", help="for everything on the GPU: weights, KV, activations, graphs")
    add("--gpu-reserve", help="of --gpu-memory, for neither weights nor KV (default: serve's)")
    add("--policies", nargs="+", default=POLICIES, help=f"default: {' '.join(POLICIES)}")
    add("--policy", type=Path, help="policy file of paged")
    add("--phases", nargs="+", default=PHASES, help="NAME:SECONDS:RATE[:PROMPT[:OUTPUT]]")
    add("--peak", default="burst", help="the phase that is measured by itself")
    add("--prompt-tokens", default="96-256")
    add("--output-tokens", default="128-256")
    add("--text", help="where prompts come from (default: the texts of Python's help())")
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=1)
    add("--together", type=int, default=1, help="servers to start side by side")
    add("--start-seconds", type=positive_float, default=START_SECONDS, help="to come up in")
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
    stream = _stream(options)
    sizes = [
        t and parse_bytes(t) for t in (options.memory, options.gpu_memory, options.gpu_reserve)
    ]
    trial = Trial(
        options.checkpoint,
        budget_of(options.checkpoint, *sizes),
        load,
        options.peak,
        tuple(draw(load, stream)),
        tuple(draw(WARM_UP, stream)),
        options.policy,
        tuple(vllm),
        folder,
        start_seconds=options.start_seconds,
    )
    for name in options.policies:
        command_of(name, trial)
    return trial


def _stream(options: argparse.Namespace) -> list[int]:
    """Tokens that prompts are cut from."""
    if not has_tokenizer(options.checkpoint):
        config = json.loads((options.checkpoint / "config.json").read_text())
        rng = np.random.default_rng(options.seed)
        drawn: list[int] = rng.integers(0, config["vocab_size"], RANDOM_TOKENS).tolist()
        return drawn
    text = read_text(options.text)[0] if options.text else python_topics()
    return tokenize(text, options.checkpoint)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    check_clock()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end too
    for name in ("repeats", "together"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} is {getattr(options, name)}; give at least 1")
    from pagedweight.bench.record import write_record

    own = [Path(word).name if word.startswith("/") else word for word in given]
    shown, runs = ["pagedweight", "bench", "pressure", *own], []
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        trial = trial_of(options, given[split + 1 :], kept)
        damage = damage_of_levels(trial.checkpoint)
        print(f"{len(trial.asks)} requests in {trial.load.seconds:.0f} s\n{HEAD}", flush=True)

        def told(done: Run) -> None:
            """Written as they come: a long measurement may be cut short."""
            runs.append(done)
            print(line(done), flush=True)
            result = record(trial, runs, shown, damage)
            result["not_measured"] = not_measured(options.policies, runs)
            write_record(options.output, result)

        run_all(trial, options.policies, options.repeats, told, options.together)
    if missing := not_measured(options.policies, runs):
        sys.exit(f"not measured, as said above: {', '.join(missing)}")
    lost = [run.name for run in runs if run.outcome.lost]
    if lost:
        faults = {a.fault for run in runs for a in run.answers if a.fault}
        sys.exit(f"requests were lost by {json.dumps(lost)}: {sorted(faults)[:3]}")


if __name__ == "__main__":
    main()
