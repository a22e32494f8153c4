"""build_project.sh --target npu, as on a node: vllm-ascend is compiled for its chip, and vLLM finds it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from dataclasses import replace

import ascend_build
import pytest
from ascend_host import ROOT, git, make_host, make_python, names_in, needs_git
from packaging.utils import canonicalize_name

import sources

pytestmark = pytest.mark.weekly

A3, A2 = "ascend910_9391", "ascend910b3"
# Of requirements.in, not in .venv: two that need an NPU, and others that nothing here imports.
NOT_HERE = {"torch-npu", "triton-ascend", "cmake", "decorator", "modelscope", "quart"}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [2] * 20]
# A server's engine, as verl makes it: in a process of its own.
PROGRAM = """
import asyncio, json, os, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    settings = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(sys.argv[1], enforce_eager=True, **settings))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def answer(number, prompt):
        async for output in llm.generate({"prompt_token_ids": prompt}, sampling, str(number)):
            pass
        return list(output.outputs[0].token_ids)

    ids = await asyncio.gather(*map(answer, range(9), json.loads(sys.argv[2])))
    print("ANSWER", json.dumps([os.getpid(), ids]))
    await asyncio.sleep(1.5)  # for the record of the device
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


def npus(sample: str) -> dict[str, str]:
    """For Host.build: the node has these NPUs."""
    return {"NPU_SAMPLES": f"{ROOT}/tests/samples/{sample}", "tools": f"{ROOT}/tests/stubs/bin"}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host on which nothing is built yet, with vllm_ascend from git."""
    host = make_host(tmp_path_factory.mktemp("ascend"))
    result = host.run(
        "bash", "download_frameworks_source_code.sh", "--only", "vllm_ascend", "--source", "git"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return host


@needs_git
def test_without_a_chip_or_without_cann_it_says_what_to_do(host):
    result = host.build()
    assert result.returncode == 1 and "on a build server name it, e.g. --soc ascend910_9391" in result.stderr
    result = host.build("--soc", "ascend950")
    assert result.returncode == 1 and "cannot be compiled for the chip 'ascend950'" in result.stderr
    result = host.build("--soc", A3, ASCEND_HOME_PATH="", ASCEND_TOOLKIT_HOME="/nowhere")
    assert result.returncode == 1 and "set_env.sh" in result.stderr
    assert host.calls == [] and not list(host.tree.glob("vllm_ascend/_build_info.py"))


@needs_git
def test_an_interrupted_build_leaves_the_tree_alone(host):
    """The next test continues from here."""
    host.log.with_name("cmake.log.fails").touch()
    result = host.build("--soc", A3)
    host.log.with_name("cmake.log.fails").unlink()
    assert result.returncode == 1 and "error: no space left" in result.stderr
    assert "failed with status 1" in result.stderr and "run this again" in result.stderr
    assert git(host.tree, "status", "--porcelain", "--ignored") == ""


@needs_git
def test_a_node_of_a3_gets_what_it_can_load(host):
    configured = sum("-DSOC_VERSION=" in call for call in host.calls)
    made = host.root / "frameworks/.build-vllm_ascend"
    temporary = next(path for path in made.glob("build/temp*") if path.is_dir())
    (temporary / "objects").write_text("of the first try\n")
    result = host.build(MAX_JOBS="3", **npus("a3_healthy"))
    assert result.returncode == 0, result.stdout + result.stderr
    calls = host.calls
    assert sum("-DSOC_VERSION=" in call for call in calls) > configured
    assert {f"SOC={A3} CANN={host.env['ASCEND_HOME_PATH']}"} == {" ".join(c.split()[:2]) for c in calls}
    (package,) = {call.partition(": ")[2] for call in calls if "-DASCEND_COMPUTE_UNIT" in call}
    assert "-DASCEND_COMPUTE_UNIT=ascend910_93 " in package + " " and "moe_gating_top_k" in package
    assert any("--build . -j=3 --target=vllm_ascend_C" in call for call in calls)
    (library,) = host.tree.glob("vllm_ascend/vllm_ascend_C*.so")
    assert library.read_text() == "of the first try\ncompiled\n"
    assert (host.tree / "vllm_ascend/_cann_ops_custom/vendors/op.so").exists()
    # What a rollout server asks, in a process that knows nothing of this test.
    assert host.says("""
from importlib.metadata import entry_points, version
(found,) = entry_points(group="vllm.platform_plugins")
import vllm, vllm_ascend, vllm_ascend._build_info as built
print(found.value, found.load()(), version("vllm_ascend"), version("vllm"), vllm.__version__)
others = entry_points(group="vllm.general_plugins")
print(built.__device_type__, built.__file__, sum("ascend" in e.name for e in others))
""") == [
        "vllm_ascend:register", "vllm_ascend.platform.NPUPlatform", "0.13.0", "0.13.0+empty", "0.13.0",
        "A3", f"{host.tree}/vllm_ascend/_build_info.py", "3",
    ]  # fmt: skip
    assert "compiled for A3 (ascend910_9391)" in result.stdout
    # And the preflight misses only what a machine without NPUs cannot have.
    judged = host.says("""
from ascend_rl.preflight import doctor, node_facts
facts = node_facts.collect()
lock = node_facts.load_lock()
checks = doctor.check_versions, doctor.check_trees, doctor.check_rollout
print(facts["rollout"]["chip"])
print(*(f.check for check in checks for f in check(facts, lock) if f.severity == "error"))
""", **npus("a3_healthy"))  # fmt: skip
    assert judged[0] == A3 and set(judged[1:]) == {"versions.package"}
    # Nothing in the user's settings, nothing that would count as work in the tree.
    assert git(host.tree, "status", "--porcelain") == ""
    assert not (host.python.parents[2] / ".gitconfig").exists()


@needs_git
def test_a_rollout_server_of_it_generates(host, tiny, tmp_path):
    """With nothing set but what CANN's and this machine's device need: greedy tokens equal Hugging Face's."""
    import torch
    from transformers import AutoModelForCausalLM

    have = {canonicalize_name(found.metadata["Name"]) for found in importlib.metadata.distributions()}
    assert names_in("requirements.in") - have == NOT_HERE
    (tmp_path / "server.py").write_text(PROGRAM)
    (tmp_path / "record").mkdir()
    ran = subprocess.run(
        [host.python, "server.py", tiny / "model", json.dumps(PROMPTS)],
        cwd=tmp_path,
        env=host.env | {"SOFTWARE_NPU_RECORD": str(tmp_path / "record")},
        capture_output=True,
        text=True,
    )
    answers = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    assert ran.returncode == 0 and answers, ran.stdout[-4000:] + ran.stderr[-4000:]
    server, answered = json.loads(answers[0].removeprefix("ANSWER "))
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    for prompt, ids in zip(PROMPTS, answered, strict=True):
        whole = torch.tensor([prompt])
        with torch.no_grad():
            for _ in ids:
                whole = torch.cat([whole, model(whole).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert len(ids) == 8 and ids == whole[0, len(prompt) :].tolist()
    ((engine, calls),) = [
        (int(path.stem), json.loads(path.read_text())["calls"])
        for path in (tmp_path / "record").glob("*.json")
    ]
    assert engine != server and calls["npu_fused_infer_attention_score"] >= 2 * 8  # layers x steps


@needs_git
def test_without_the_driver_an_image_can_be_built(host):
    """torch_npu then cannot be loaded, and torch tries whenever it is imported."""
    (site,) = host.python.parents[1].glob("lib/python3*/site-packages")
    software = site / "torch_npu.pth"
    kept = software.read_text()
    software.unlink()
    package, info = site / "torch_npu", site / "torch_npu-0.dist-info"
    for directory in (package, info):
        directory.mkdir()
    missing = "libascend_hal.so: cannot open shared object file: No such file or directory"
    (package / "__init__.py").write_text(f"raise ImportError({missing!r})\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.8.0.post2\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    result = host.build("--soc", A3)
    for directory in (package, info):
        shutil.rmtree(directory)
    software.write_text(kept)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"vLLM finds, but cannot load without NPUs ({missing}), the platform" in result.stdout


@needs_git
def test_what_is_built_is_not_built_again_but_for_another_chip(host):
    before = len(host.calls)
    assert host.build(SOC_VERSION=A3).returncode == 0
    assert len(host.calls) == before
    result = host.build("--soc", "ascend910_9381")
    assert result.returncode == 0 and len(host.calls) > before
    (library,) = host.tree.glob("vllm_ascend/vllm_ascend_C*.so")
    assert library.read_text() == "compiled\n"  # from the beginning


@needs_git
def test_on_an_a2_the_wheel_serves(host):
    before = len(host.calls)
    result = host.build(**npus("a2_busy"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"compiled for A2 ({A2})" in result.stdout and len(host.calls) == before
    (library,) = host.tree.glob("vllm_ascend/vllm_ascend_C*.so")
    assert library.stat().st_size > 1000


@needs_git
def test_lost_metadata_comes_back_and_a_second_platform_is_an_error(host):
    (site,) = host.python.parents[1].glob("lib/python3*/site-packages")
    (info,) = site.glob("vllm_ascend-*.dist-info")
    shutil.rmtree(info)
    other = site / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other_platform:register\n")
    result = host.build("--soc", A3)
    shutil.rmtree(other)
    assert result.returncode == 1 and info.is_dir()
    assert "the platforms of ['other_platform', 'vllm_ascend']" in result.stderr


# What of vLLM's repository is not in the wheel and is read here.
PYPROJECT = """
[project]
name = "vllm"
dynamic = ["version"]

[project.scripts]
vllm = "vllm.entrypoints.cli.main:main"

[project.entry-points."vllm.general_plugins"]
lora_filesystem_resolver = "vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver"
"""
WHO = """
from importlib.metadata import entry_points, version
import vllm
from vllm.platforms import current_platform
own = [e for e in entry_points(group="vllm.general_plugins") if e.value.startswith("vllm.")]
(script,) = entry_points(group="console_scripts", name="vllm")
print(version("vllm"), vllm.__version__, current_platform.device_type, vllm.__file__)
print(*(callable(e.load()) and e.name for e in [*own, script]))
"""


def make_vllm_upstream(directory) -> str:
    """A repository like vLLM's at the pin, from the files of the wheel; returns its commit."""
    tree = ROOT / "frameworks/vllm"
    directory.mkdir()
    packed = subprocess.run(["git", "-C", tree, "archive", sources.BASE_TAG], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", directory], input=packed.stdout, check=True)
    if sources.read_json(tree / ".git" / sources.SOURCE_FILE)["source"] == "pypi":
        for info in directory.glob("*.dist-info"):
            shutil.rmtree(info)
        (directory / "vllm/_version.py").unlink()
        module = directory / "vllm/__init__.py"
        module.write_text(module.read_text().partition("# End of CPU Platform Fix\n")[2])
        (directory / "pyproject.toml").write_text(PYPROJECT)
        (directory / ".gitignore").write_text("/vllm/_version.py\n*.so\n")
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-qm", "vLLM")
    git(directory, "tag", sources.Project.load(ROOT).framework("vllm").tag)
    return git(directory, "rev-parse", "HEAD")


@needs_git
def test_vllm_from_git_is_known_by_its_version_and_its_entry_points(host, tmp_path):
    """For NPUs and for CPUs, each in its own environment; after the tests above."""
    upstream = tmp_path / "upstream"
    vllm, lock = sources.Project.load(ROOT).framework("vllm"), host.root / "frameworks.lock"
    lock.write_text(lock.read_text().replace(vllm.commit, make_vllm_upstream(upstream)))
    mirror = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": vllm.url,
              "GIT_CONFIG_KEY_0": f"url.{upstream.as_uri()}.insteadOf"}  # fmt: skip
    fetched = host.run(
        "bash", "download_frameworks_source_code.sh", "--only", "vllm", "--source", "git", **mirror
    )
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    result = host.build("--soc", A3)
    assert result.returncode == 0, result.stdout + result.stderr
    package = f"{host.root}/frameworks/vllm/vllm/__init__.py"
    said = host.says(WHO, VLLM_LOGGING_LEVEL="ERROR")
    assert said == ["0.13.0+empty", "0.13.0", "npu", package, "lora_filesystem_resolver", "vllm"]
    laptop = replace(host, python=make_python(tmp_path / "laptop"))
    result = laptop.run(laptop.python, "patches/install.py", "--target", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    said = laptop.says(WHO, VLLM_LOGGING_LEVEL="ERROR")
    assert said == ["0.13.0+cpu", "0.13.0", "cpu", package, "lora_filesystem_resolver", "vllm"]
    (library,) = host.root.glob("frameworks/vllm/vllm/*.so")
    assert library.stat().st_size > 1000 and git(library.parents[1], "status", "--porcelain") == ""


def test_the_wheel_is_refused_where_its_series_does_not_fit(tmp_path):
    project = sources.Project(tmp_path, sources.Project.load(ROOT).tables)
    framework = project.framework("vllm_ascend")
    package = project.tree("vllm_ascend") / "vllm_ascend"
    package.mkdir(parents=True)
    (package.parent / ".git").mkdir()
    sources.write_json(package.parent / ".git" / sources.SOURCE_FILE, {"source": "pypi"})
    (package / "_build_info.py").write_text("# Auto-generated file\n__device_type__ = 'A2'\n")
    ascend_build.compiled_for(project, framework, A2, tmp_path, os.environ)
    with pytest.raises(
        sources.ToolError, match="compiled for A2, and ascend910_9391 is A3.*\n.*--source git"
    ):
        ascend_build.compiled_for(project, framework, A3, tmp_path, os.environ)


def test_the_lock_says_what_the_wheel_is_compiled_for():
    tree = ROOT / "frameworks/vllm_ascend"
    if sources.read_json(tree / ".git" / sources.SOURCE_FILE).get("source") != "pypi":
        pytest.skip("frameworks/vllm_ascend is not from the wheel")
    device = sources.Project.load(ROOT).tables["vllm_ascend"]["device"]
    assert ascend_build.built_for(tree / "vllm_ascend") == device
