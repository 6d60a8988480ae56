"""Is the plugin alive where vLLM needs it: in the API server, the engine core and every worker?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pagedweight.serving.doctor.finding import Finding

GROUP, NAME = "vllm.general_plugins", "pagedweight"
SECONDS = 300
_SAID = re.compile(r"\((\w+) pid=\d+\).*pagedweight \S+ is active in process (\d+)")


def plugin(out: Path | None) -> list[Finding]:
    """vLLM's plugin loading in a process of its own; with a checkpoint `out`, in a real engine."""
    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        way_out = "install pagedweight with pip, so that its entry point is there"
        return [Finding("plugin", "wrong", f"no entry point {NAME} in {GROUP}", way_out)]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        way_out = f"add {NAME} to VLLM_PLUGINS, or unset it"
        return [Finding("plugin", "wrong", f"VLLM_PLUGINS is {allowed!r}", way_out)]
    answer, log = _ask(out)
    findings = [_loaded(answer, log)]
    if out is not None and answer.get("registered"):
        findings.append(_engine(answer, log))
    return findings


def _ask(out: Path | None) -> tuple[dict[str, Any], str]:
    """The probe's answer (empty when it gave none) and everything that was written."""
    command = [sys.executable, "-m", "pagedweight.serving.doctor.probe"]
    command += [] if out is None else [str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        written = error.stdout or b""
        return {}, f"no answer after {SECONDS} s\n{written.decode(errors='replace')}"
    log = f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), log
    return _registered_before(log), log


def _registered_before(log: str) -> dict[str, Any]:
    """The engine failed; whether the plugin was there, its own line says."""
    return {"registered": True} if "is active in process" in log else {}


def _loaded(answer: dict[str, Any], log: str) -> Finding:
    if answer.get("registered"):
        where = f" (platform {answer['platform']})" if "platform" in answer else ""
        return Finding("plugin", "ok", f"vLLM has the method {NAME}{where}", values=answer)
    said = answer.get("error") or f"vLLM did not load it: {_last(log)}"
    return Finding("plugin", "wrong", said, "see the error; reinstall what it names", answer)


def _engine(answer: dict[str, Any], log: str) -> Finding:
    processes = dict(_SAID.findall(log))
    values = {"processes": processes, "tokens": answer.get("tokens", 0)}
    if not answer.get("tokens"):
        said = f"no tokens came: {_last(log)}"
        return Finding("engine", "wrong", said, "see the error; serve OUT shows all of it", values)
    if "EngineCore" not in processes:
        said = f"the plugin spoke in {', '.join(processes) or 'no process'}, not in the engine core"
        return Finding("engine", "wrong", said, "unset VLLM_LOGGING_LEVEL and try again", values)
    said = f"{answer['tokens']} tokens; alive in {', '.join(processes)}"
    return Finding("engine", "ok", said, values=values)


def _last(log: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error\b", line)]
    return (errors or lines or ["nothing was written"])[-1]
