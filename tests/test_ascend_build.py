"""build_project.sh --target npu, as on a node: vllm-ascend is compiled for its chip, and vLLM finds it."""

from __future__ import annotations

import os
import shutil

import ascend_build
import pytest
from ascend_host import MIRROR, ROOT, git, make_host

import sources

A3, A2 = "ascend910_9391", "ascend910b3"
needs_mirror = pytest.mark.skipif(not MIRROR.exists(), reason="no git repository of vllm-ascend at hand")


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


@needs_mirror
def test_without_a_chip_or_without_cann_it_says_what_to_do(host):
    result = host.build()
    assert result.returncode == 1 and "on a build server name it, e.g. --soc ascend910_9391" in result.stderr
    result = host.build("--soc", "ascend950")
    assert result.returncode == 1 and "cannot be compiled for the chip 'ascend950'" in result.stderr
    result = host.build("--soc", A3, ASCEND_HOME_PATH="", ASCEND_TOOLKIT_HOME="/nowhere")
    assert result.returncode == 1 and "set_env.sh" in result.stderr
    assert host.calls == [] and not list(host.tree.glob("vllm_ascend/_build_info.py"))


@needs_mirror
def test_an_interrupted_build_leaves_the_tree_alone(host):
    """The next test goes on from here."""
    host.log.with_name("cmake.log.fails").touch()
    result = host.build("--soc", A3)
    host.log.with_name("cmake.log.fails").unlink()
    assert result.returncode == 1 and "error: no space left" in result.stderr
    assert "failed with status 1" in result.stderr and "run this again" in result.stderr
    assert git(host.tree, "status", "--porcelain", "--ignored") == ""


@needs_mirror
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


@needs_mirror
def test_what_is_built_is_not_built_again_but_for_another_chip(host):
    before = len(host.calls)
    assert host.build(SOC_VERSION=A3).returncode == 0
    assert len(host.calls) == before
    result = host.build("--soc", "ascend910_9381")
    assert result.returncode == 0 and len(host.calls) > before
    (library,) = host.tree.glob("vllm_ascend/vllm_ascend_C*.so")
    assert library.read_text() == "compiled\n"  # from the beginning


@needs_mirror
def test_on_an_a2_the_wheel_serves(host):
    before = len(host.calls)
    result = host.build(**npus("a2_busy"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"compiled for A2 ({A2})" in result.stdout and len(host.calls) == before
    (library,) = host.tree.glob("vllm_ascend/vllm_ascend_C*.so")
    assert library.stat().st_size > 1000


@needs_mirror
def test_lost_metadata_comes_back_and_a_second_platform_is_an_error(host):
    (site,) = host.python.parents[1].glob("lib/python3*/site-packages")
    (info,) = site.glob("vllm_ascend-*.dist-info")
    shutil.rmtree(info)
    other = site / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other_platform:register\n")
    result = host.build("--soc", A3)
    assert result.returncode == 1 and info.is_dir()
    assert "the platforms of ['other_platform', 'vllm_ascend']" in result.stderr


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
