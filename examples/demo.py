"""`make demo`: precision gives way to KV cache under load, and comes back.

The tiny model of this repository is quantized, then served three times by vLLM in the same memory:
paged (bits follow the load), at 6 bits (requests get preempted), at 3 bits (quality is lost). The
same crowd asks each time. Texts are those of Python's own `help()`; nothing is downloaded, all is
written below out/. Takes a few minutes on two cores. Exits with 1 when a request was lost or the
story does not hold.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pagedweight.bench.client import Answer, check_clock
from pagedweight.bench.contestants import Budget
from pagedweight.bench.divergence import BitsAt, Written, mean_kl, traced_bits
from pagedweight.bench.load import Lengths, Load, Phase, draw, python_topics
from pagedweight.bench.plot import draw as draw_picture
from pagedweight.bench.pressure import WARM_UP, Run, Trial, run
from pagedweight.calibrate.text import tokenize
from pagedweight.checkpoint.plan import uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError
from pagedweight.eval.reference import load_plain
from pagedweight.runtime.timeline import Sample, Timeline
from pagedweight.runtime.trace import BitTrace

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-moe"
OUT = ROOT / "out"
WORK = OUT / "demo"
PICTURE = OUT / "demo.png"
POLICY = ROOT / "examples" / "tiny-policy.json"
"""The defaults keep 64 blocks free before bits return: more than this budget has at the start."""
MEMORY = 41 << 19
"""20.5 MiB: experts at 6 bits, and KV for some six of these requests; up to 16 run at once."""
CROWD = Load(
    (Phase("calm", 4, 1.0), Phase("burst", 4, 16.0), Phase("calm again", 6, 1.0)),
    prompt=(96, 256),
    output=(128, 256),
)
VLLM = ("--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager")
LABELS = {"paged": "paged", "static6": "6 bits fixed", "static3": "3 bits fixed"}
JUDGED = 24
"""Answers of each run that are compared with the source, spread over the run."""
SLICES = 6
"""Parts of the paged run, each judged at the bits of its middle."""

console = Console(highlight=False, width=100)


def main() -> None:
    start = time.monotonic()
    check_clock()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    text = python_topics()
    checkpoint = quantize(text[: len(text) // 2])
    trial = trial_of(checkpoint, text[len(text) // 2 :])
    runs = {name: serve(name, trial) for name in LABELS}
    divergence = judge(trial, runs)
    draw_picture(
        [since_first_request(run) for run in runs.values()], list(LABELS.values()), PICTURE
    )
    show_story(runs["paged"])
    show_comparison(runs, divergence)
    faults = list(faults_of(runs, divergence))
    for fault in faults:
        console.print(f"[bold red]The story does not hold:[/] {fault}")
    console.print(
        f"Picture: [bold]{PICTURE.relative_to(ROOT)}[/]. Timelines and logs of the servers: "
        f"{WORK.relative_to(ROOT)}/. Took {time.monotonic() - start:.0f} s."
    )
    sys.exit(1 if faults else 0)


def quantize(text: str) -> Path:
    """Calibrate on `text`, write the checkpoint, show what is in it."""
    console.rule("[bold]1. Quantize: 2 to 6 bits, nested, in one checkpoint", align="left")
    calibration, out = WORK / "calibration.txt", WORK / "tiny-moe"
    calibration.write_text(text, encoding="utf-8")
    flags = ["--calibration", calibration, "--sequences", 8, "--sequence-length", 1024]
    command("quantize", MODEL, "--output", out, *flags)
    command("inspect", out)
    return out


def command(*arguments: object) -> None:
    """Run `pagedweight` as a user would, and say so."""
    words = [str(word).removeprefix(f"{ROOT}/") for word in arguments]
    console.print(f"[dim]$ pagedweight {' '.join(words)}[/]")
    called = [sys.executable, "-m", "pagedweight.cli.main", *words]
    if subprocess.run(called, cwd=ROOT).returncode:
        sys.exit(f"pagedweight {words[0]} failed")


def trial_of(checkpoint: Path, text: str) -> Trial:
    """The load, drawn once for all servers."""
    stream, _ = tokenize(text, checkpoint)
    asks, warm_up = draw(CROWD, stream), draw(WARM_UP, stream)
    mib = MEMORY / (1 << 20)
    console.rule(f"[bold]2. Serve it three times, with {mib:g} MiB each", align="left")
    phases = ", then ".join(f"{p.rate:g} a second, {p.seconds:g} s" for p in CROWD.phases)
    console.print(
        f"The same {len(asks)} requests each time: {phases}.\n"
        f"A prompt has {span(CROWD.prompt)} tokens, an answer {span(CROWD.output)}. Experts and KV "
        "cache share the memory.\nWhen KV cache is short, vLLM preempts: a request loses its KV "
        "and starts over.\n"
    )
    return Trial(
        checkpoint,
        Budget(MEMORY),
        CROWD,
        "burst",
        tuple(asks),
        tuple(warm_up),
        POLICY,
        VLLM,
        WORK,
        True,
    )


def span(lengths: Lengths) -> str:
    return f"{lengths[0]} to {lengths[1]}"


def serve(name: str, trial: Trial) -> Run:
    """One server under the load."""
    with console.status(f"{LABELS[name]}: vLLM starts, then answers {len(trial.asks)} requests"):
        found = run(name, trial)
    of = found.outcome
    console.print(
        f"  {LABELS[name]:14} server up in {found.start_seconds:.0f} s, "
        f"{of.requests - of.lost} of {of.requests} answered in full, {of.preemptions} preemptions"
    )
    return found


def judge(trial: Trial, runs: Mapping[str, Run]) -> dict[str, float]:
    """Mean KL to the source of what each run generated, nats a token."""
    checkpoint = Checkpoint.open(trial.checkpoint)
    found = {}
    torch.set_num_threads(1)  # products so small that threads mostly wait for each other
    with console.status("comparing what was generated with the unquantized model"):
        source = load_plain(MODEL, torch.float32, torch.device("cpu"))
        for name, of in runs.items():
            whole = [answer for answer in of.answers if not answer.fault]
            picked = np.linspace(0, len(whole) - 1, min(JUDGED, len(whole))).astype(int)
            written = written_by(trial.checkpoint, [whole[n] for n in picked])
            slices = SLICES if name == "paged" else 1
            found[name] = mean_kl(
                source, checkpoint, written, bits_of(name, of, trial, checkpoint), slices
            )
    return found


def written_by(model: Path, answers: Sequence[Answer]) -> list[Written]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        Written.of(answer, lambda text: tokenizer(text, add_special_tokens=False).input_ids)
        for answer in answers
    ]


def bits_of(name: str, of: Run, trial: Trial, checkpoint: Checkpoint) -> BitsAt:
    """Bits by time: constant, or out of what the server recorded."""
    if name != "paged":
        plan = uniform_plan(checkpoint, int(name.removeprefix("static")))
        return lambda time: plan
    trace = BitTrace.load(trial.path(name, 0, ".trace") / "bits.jsonl")
    return traced_bits(checkpoint, of.timeline, trace)


def since_first_request(of: Run) -> Timeline:
    """The timeline without the warm-up."""
    begin = of.answers[0].sent
    samples = tuple(s for s in of.timeline.samples if s.monotonic >= begin - 0.5)
    return replace(of.timeline, samples=samples)


def show_story(of: Run) -> None:
    """Before, during and after the burst."""
    samples = since_first_request(of).samples
    begin = of.answers[0].sent - of.answers[0].ask.at + CROWD.span("burst")[0]
    before = [sample for sample in samples if sample.monotonic < begin][-1]
    during = min(samples, key=lambda sample: (sample.bits, -sample.running))
    heads = ("mean bits", "experts", "KV blocks backed", "in use", "running", "preempted so far")
    table = table_of("Paged: before, in and after the burst", heads)
    first = samples[0].preemptions
    for name, sample in (("before", before), ("at the peak", during), ("after", samples[-1])):
        table.add_row(name, *story_cells(sample, first))
    console.print()
    console.rule("[bold]3. What happened", align="left")
    console.print(table)


def story_cells(sample: Sample, preempted_before: int) -> list[str]:
    return [
        f"{sample.bits:.2f}",
        f"{sample.device_bytes / (1 << 20):.1f} MiB",
        str(sample.kv_usable),
        str(sample.kv_used),
        str(sample.running),
        str(sample.preemptions - preempted_before),
    ]


def show_comparison(runs: Mapping[str, Run], divergence: Mapping[str, float]) -> None:
    heads = ("lost", "preemptions", "tokens/s", "first token, p99", "mean bits", "KL to the source")
    table = table_of("Paged beside fixed bits", heads)
    for name, found in runs.items():
        of = found.outcome
        table.add_row(
            LABELS[name],
            str(of.lost),
            str(of.preemptions),
            f"{of.peak_tokens_per_s:.0f}",
            f"{of.all.ttft_p99 / 1000:.1f} s",
            f"{of.mean_bits:.2f}",
            f"{divergence[name]:.4f}",
        )
    console.print(table)
    console.print(
        "Tokens/s: from the start of the burst until its last answer. Bits: mean over time. KL: of "
        "next-token\ndistributions to the unquantized model's, nats a token, over "
        f"{JUDGED} answers; for paged at the bits in\nforce when each token was written.\n"
    )


def table_of(title: str, heads: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def faults_of(runs: Mapping[str, Run], divergence: Mapping[str, float]) -> Iterator[str]:
    """Sentences on everything that is not as this demo claims."""
    for name, found in runs.items():
        faults = {answer.fault for answer in found.answers if answer.fault}
        if faults:
            yield f"{LABELS[name]} lost {found.outcome.lost} requests: {sorted(faults)[0]}"
    paged, fixed = runs["paged"].outcome, runs["static6"].outcome
    if paged.preemptions:
        yield f"paged preempted {paged.preemptions} times"
    if paged.bits_back_s is None:
        yield "the bits of paged did not come back"
    if paged.lowest_bits > paged.start_bits - 1:
        yield f"bits only fell to {paged.lowest_bits:.2f}: the crowd was too small"
    if not fixed.preemptions:
        yield "6 bits fixed preempted nobody: the crowd was too small"
    if not divergence["static6"] < divergence["paged"] < divergence["static3"]:
        yield "the damage of paged is not between that of 6 bits and of 3 bits"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"demo: {error}")
