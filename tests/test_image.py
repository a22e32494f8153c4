"""The image: its pins are those of the lock, its steps run, and the scripts around it do what they say.

Docker and an Ascend host cannot exist here. What stands in for the host are files of the same names in
namespaces of the kernel (unshare), so that the scripts run unchanged and see nothing of this machine.
"""

from __future__ import annotations

import email
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from ascend_host import PLACE, make_host, needs_git
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ascend_rl.settings.stack import DEFAULT, DIRECTORY, NAME

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "Dockerfile.vllm_ascend.mindspeed.qwen3"
STACKS = [tomllib.loads(path.read_text())["ascend"] for path in (
    ROOT / "frameworks.lock", *ROOT.glob("stacks/*/frameworks.lock"))]  # fmt: skip
ASCEND = tomllib.loads((DIRECTORY / "frameworks.lock").read_text())["ascend"]
IMAGE_HOST = default_environment() | {
    "platform_machine": "aarch64",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "python_version": ASCEND["python"],
    "python_full_version": f"{ASCEND['python']}.0",
    "extra": "",
}


# Pins.


def requirements(name: str) -> list[Requirement]:
    lines = (line.split(" #")[0].strip() for line in (DIRECTORY / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


PINS = {canonicalize_name(r.name): r for r in requirements("requirements.txt")}


def pinned(name: str) -> str:
    (specifier,) = PINS[canonicalize_name(name)].specifier
    return specifier.version


def test_requirements_are_pinned_and_equal_the_lock():
    assert len(PINS) > 100
    exact = re.compile(r"[A-Za-z0-9_.-]+==[^*,;\s]+")
    assert [str(r) for r in PINS.values() if not exact.fullmatch(str(r))] == []
    elsewhere = {"image", "image_a2", "cann", "hdk", "python", "mooncake"}
    if NAME != DEFAULT:
        elsewhere.add("triton_ascend")  # installed by the Dockerfile
    expected = {name: version for name, version in ASCEND.items() if name not in elsewhere}
    assert {name: pinned(name) for name in expected} == expected
    for name in ("requirements.in", "requirements.txt"):
        assert f"--python-version {ASCEND['python']} " in (DIRECTORY / name).read_text()


def test_requirements_leave_out_what_would_break_the_image():
    """triton overwrites triton-ascend's files; the frameworks come from frameworks/; there is no CUDA."""
    assert not {"triton", "vllm", "vllm-ascend", "verl", "megatron-core", "mindspeed"} & set(PINS)
    assert not [name for name in PINS if name.startswith("nvidia")]


@pytest.mark.parametrize("requirement", requirements("requirements.in"), ids=str)
def test_pins_satisfy_what_they_were_compiled_from(requirement):
    assert requirement.specifier.contains(pinned(requirement.name), prereleases=True)


# What the image leaves out of what a framework asks for.
LEFT_OUT = {
    "vllm_ascend": {"arctic-inference", "pandas-stubs", "pip", "setuptools-scm", "wheel"},  # for builds
    "verl": {"wandb"},  # one of its trackers, imported when chosen
    "vllm": {"torch", "torchaudio", "torchvision"},  # what the CPU wheel is built for
}
if NAME != DEFAULT:
    LEFT_OUT["vllm"].add("setuptools")  # of its build
    LEFT_OUT["vllm_ascend"] |= {
        "memcache-hybrid",
        "memfabric-hybrid",
        "triton-ascend",
    }  # a backend of KV pools


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_pins_satisfy_the_frameworks(name):
    """Against the metadata that upstream released."""
    metadata = sorted((DIRECTORY / "frameworks" / name).glob("*.dist-info/METADATA"))
    lines = metadata and email.message_from_bytes(metadata[0].read_bytes()).get_all("Requires-Dist")
    if not lines:
        pytest.skip(f"{name} was cloned from git: what it requires is in the wheel's metadata only")
    needs = [
        r
        for r in map(Requirement, lines)
        if canonicalize_name(r.name) not in LEFT_OUT[name]
        and (r.marker is None or r.marker.evaluate(IMAGE_HOST))
    ]
    assert len(needs) > 10
    missing = [str(r) for r in needs if canonicalize_name(r.name) not in PINS]
    wrong = [
        str(r)
        for r in needs
        if canonicalize_name(r.name) in PINS and not r.specifier.contains(pinned(r.name), prereleases=True)
    ]
    assert (missing, wrong) == ([], [])


def test_documents_name_the_pinned_image():
    for name in ("docs/image.md", "docs/image.zh.md"):
        text = (ROOT / name).read_text()
        assert set(re.findall(r"cann:[\w.-]+", text)) == {
            pins[kind] for pins in STACKS for kind in ("image", "image_a2")
        }
        assert all(f"torch_npu {pins['torch_npu']}" in text for pins in STACKS)


# The Dockerfile.


def steps() -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments removed."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@pytest.mark.skipif(NAME != DEFAULT, reason="the default stack's run does it")
def test_hadolint():
    command = [Path(sys.executable).parent / "hadolint", DOCKERFILE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_dockerfile_pins_nothing_itself():
    assert not re.findall(r"\d+\.\d+", "\n".join(arguments for _, arguments in steps()))
    assert ("FROM", "${REGISTRY}/${CANN_IMAGE}") in steps()
    assert "${PINS}/requirements.txt" in dict(reversed(steps()))["COPY"]


def copy_step(arguments: str, context: Path, image: Path) -> None:
    """COPY, as far as this Dockerfile uses it: files of the context that .dockerignore does not name."""
    *sources, target = arguments.replace("${PINS}", str(PLACE)).split()
    ignored = [
        line.removeprefix("**/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for source in sources:
        if source == ".":
            shutil.copytree(context, image, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*ignored))
        else:
            (image / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(context / source, image / target)


@needs_git
@pytest.mark.weekly
def test_the_steps_after_the_packages_run_with_what_is_copied_before_them(tmp_path):
    """Downloads and builds for the NPU in a directory that holds what the image would hold at that step.

    The sources come from this checkout instead of the network; MindSpeed has no wheel, so its line is left
    out where it is not there.
    """
    host = make_host(tmp_path)
    image = host.root.with_name("image")
    image.mkdir()
    (image / PLACE).mkdir(parents=True, exist_ok=True)
    (host.root / PLACE / "frameworks").rename(image / PLACE / "frameworks")
    arguments_of = {
        name: default for name, _, default in (a.partition("=") for i, a in steps() if i == "ARG")
    } | {"STACK": NAME, "PINS": str(PLACE)}
    ran = []
    for instruction, arguments in steps():
        if instruction == "COPY":
            copy_step(arguments, host.root, image)
        if instruction == "RUN" and ("download_" in arguments or "build_project" in arguments):
            if not (DIRECTORY / "frameworks/mindspeed").exists():
                arguments = arguments.replace("&& ./download_frameworks_source_code.sh --only mindspeed", "")
            command = ["bash", "-euo", "pipefail", "-c", arguments]
            result = replace(host, root=image).run(*command, **arguments_of)
            assert result.returncode == 0, result.stdout + result.stderr
            ran.append(arguments)
    assert len(ran) == 2
    packages = ("verl", "vllm", "vllm_ascend", "ascend_rl")
    *found, series = host.says(
        f"import importlib.util as u; print(*(u.find_spec(name).origin for name in {packages}), sep='\\n'); "
        "from vllm_ascend import _build_info; print(_build_info.__device_type__)"
    )
    assert [Path(path).is_relative_to(image) for path in found] == [True] * 4 and series == "A3"


# run_container.sh and clean_cache.sh, in namespaces.

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-mpnf", "--mount-proc", "true"], capture_output=True).returncode != 0,
    reason="this machine allows no mount namespaces (run as root)",
)

ASCEND_HOST = """
mount -t tmpfs none /usr/local; mount -t tmpfs none /mnt
mkdir -p /usr/local/Ascend/driver /usr/local/dcmi /usr/local/bin /mnt/dev /mnt/etc /mnt/data
touch /usr/local/bin/npu-smi /mnt/etc/ascend_install.info /mnt/etc/hccn.conf
cp /etc/passwd /mnt/etc; mount --bind /mnt/etc /etc
ln -s /proc/self/fd /mnt/dev/fd; touch /mnt/dev/null
touch /mnt/dev/davinci{0..15} /mnt/dev/davinci_manager /mnt/dev/devmm_svm /mnt/dev/hisi_hdc
mount --bind /mnt/dev /dev
"""


def run_isolated(setup: str, command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run bash as root of its own mount, process and network namespaces; this checkout is at /srv there."""
    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/", "STACK": NAME} | env
    with tempfile.NamedTemporaryFile("w") as script:  # not -c: what it names would be in a command line
        script.write(f"set -e\nmount --make-rprivate /\nmount --bind {ROOT} /srv\n{setup}\n{command}\n")
        script.flush()
        return subprocess.run(
            ["unshare", "-mpnf", "--mount-proc", "bash", script.name],
            env=env,
            timeout=600,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def container(arguments: str, change_host: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return run_isolated(ASCEND_HOST + change_host, f"exec bash /srv/run_container.sh {arguments}", **env)


@needs_namespaces
def test_container_gets_all_npus_the_driver_and_no_privileges():
    result = container("--dry-run --mount /mnt/data qwen3 ascend-rl:1 sleep infinity")
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    assert words[:3] == ["docker", "run", "-dit"] and words[-3:] == ["ascend-rl:1", "sleep", "infinity"]
    devices = [word.split("/")[-1] for word in words if word.startswith("--device=")]
    assert devices == [f"davinci{n}" for n in range(16)] + ["davinci_manager", "devmm_svm", "hisi_hdc"]
    volumes = {word.removeprefix("--volume=") for word in words if word.startswith("--volume=")}
    assert {
        "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
        "/etc/hccn.conf:/etc/hccn.conf:ro",
        "/mnt/data:/mnt/data",
    } <= volumes
    assert {"--network=host", "--shm-size=64g"} <= set(words) and "--privileged" not in words


@needs_namespaces
def test_container_options():
    result = container(
        "--dry-run --build --mooncake --privileged --devices 2,10-12 --shm-size 1g qwen3 ascend-rl:1",
        PIP_INDEX_URL="https://example.com/a b",
    )
    assert result.returncode == 0, result.stderr
    build, run = map(shlex.split, result.stdout.splitlines())
    arguments = [word.removeprefix("--build-arg=") for word in build if word.startswith("--build-arg=")]
    assert arguments == [
        f"CANN_IMAGE={ASCEND['image']}",
        *(
            []
            if NAME == DEFAULT
            else [f"STACK={NAME}", f"PINS={PLACE}", f"TRITON_ASCEND={ASCEND['triton_ascend']}"]
        ),
        f"MOONCAKE={ASCEND['mooncake']}",
        "PIP_INDEX_URL=https://example.com/a b",
    ]
    assert {name for name, _, _ in (a.partition("=") for a in arguments)} <= {
        arguments.partition("=")[0] for instruction, arguments in steps() if instruction == "ARG"
    }
    assert [word for word in run if re.search(r"davinci\d", word)] == [
        f"--device=/dev/davinci{n}" for n in (2, 10, 11, 12)
    ]
    assert {"--privileged", "--shm-size=1g"} <= set(run)


NPU_SMI = "printf '#!/bin/sh\\necho \"| 0     {chip}              | OK\"\\n' >/usr/local/bin/npu-smi\n"


@needs_namespaces
@pytest.mark.parametrize(
    ("chip", "soc", "image"),
    [
        ("910B3", "ascend910b3", "image_a2"),
        ("Ascend910", "", "image"),
        ("", "ascend910b1", "image_a2"),
        ("910B3", "ascend910_9391", "image"),
    ],
)
def test_the_image_is_for_the_chip_of_the_host(chip, soc, image):
    """The one that npu-smi shows, or the one that is asked for."""
    npu_smi = NPU_SMI.format(chip=chip) + "chmod +x /usr/local/bin/npu-smi\n" if chip else ""
    asked = f"--soc {soc}" if soc and soc.removeprefix("ascend") != chip.lower() else ""
    result = container(f"--dry-run --build {asked} a b", npu_smi)
    assert result.returncode == 0, result.stderr
    build, run = map(shlex.split, result.stdout.splitlines())
    assert f"--build-arg=CANN_IMAGE={ASCEND[image]}" in build
    assert [word for word in build if "SOC_VERSION" in word] == (
        [f"--build-arg=SOC_VERSION={soc}"] if soc else []
    )
    assert ("--env=NPU_SERIES=a2" in run) == (image == "image_a2")


@needs_namespaces
def test_a_build_server_needs_no_npus():
    result = container(
        "--dry-run --build --soc ascend910_9381 a b",
        "rm /dev/davinci?*; rmdir /usr/local/Ascend/driver\n",
    )
    assert result.returncode == 0 and "no container is started" in result.stderr
    (build,) = map(shlex.split, result.stdout.splitlines())
    assert build[:2] == ["docker", "build"] and "--build-arg=SOC_VERSION=ascend910_9381" in build


@needs_namespaces
@pytest.mark.parametrize(
    "change_host, arguments, message",
    [
        ("rm /dev/davinci?*", "--dry-run a b", "no /dev/davinci"),
        ("rm /dev/hisi_hdc", "--dry-run a b", "/dev/hisi_hdc does not exist"),
        (
            "rmdir /usr/local/Ascend/driver",
            "--dry-run a b",
            f"install the Ascend driver (HDK {ASCEND['hdk']})",
        ),
        ("", "--dry-run --devices 14-16 a b", "/dev/davinci16 does not exist; this host has: 0 1 2"),
        ("", "--dry-run --devices all a b", "'all' is not"),
        ("", "--dry-run --soc ascend310p a b", "--soc ascend310p: no chip of an Atlas A2"),
        ("", "--dry-run --mount data a b", "not the absolute path"),
        ("", "--dry-run --mount /mnt/none a b", "/mnt/none: not the absolute path of a directory"),
        ("", "--dry-run --shm-size lots a b", "--shm-size is a number"),
        ("", "--dry-run a", "give a container name and an image"),
        ("", "a b", "'docker' is not installed"),
    ],
)
def test_container_errors_say_what_to_do(change_host, arguments, message):
    result = container(arguments, change_host + "\n")
    assert result.returncode == 1 and message in result.stderr, result.stdout + result.stderr
    assert result.stdout == ""


CACHES = """
mount -t tmpfs none /tmp; mkdir /tmp/home; export HOME=/tmp/home; cd $HOME
mkdir -p .cache/pip .cache/vllm/torch_compile_cache .cache/huggingface/hub .cache/torch_extensions .cache/mine
mkdir -p kernel_meta kernel_meta_temp_1 kernel_meta_notes project /tmp/torchinductor_root
mkdir -p /tmp/ray/session_2026-01-01_00-00-00_000000_11 /tmp/ray/session_2026-01-02_00-00-00_000000_22
mkdir /tmp/elsewhere; touch /tmp/elsewhere/work; ln -s /tmp/elsewhere atc_data
touch .cache/huggingface/token .cache/vllm/notes project/work
left() { find /tmp -mindepth 1 | sort; }
"""
REMOVED = {
    "/tmp/home/.cache/pip",
    "/tmp/home/.cache/vllm/torch_compile_cache",
    "/tmp/torchinductor_root",
    "/tmp/home/.cache/torch_extensions",
    "/tmp/home/kernel_meta",
    "/tmp/home/kernel_meta_temp_1",
}
RAY = {"/tmp/ray/session_2026-01-01_00-00-00_000000_11", "/tmp/ray/session_2026-01-02_00-00-00_000000_22"}
HUB = "/tmp/home/.cache/huggingface/hub"


def clean(arguments: str, before: str = "") -> tuple[set[str], str]:
    """What clean_cache.sh removed, and what it said."""
    script = f"left; echo ==; {before}\nbash /srv/clean_cache.sh {arguments} 2>&1; echo ==; left"
    result = run_isolated(CACHES, script)
    assert result.returncode == 0, result.stdout + result.stderr
    before_files, said, after_files = result.stdout.split("==\n")
    return set(before_files.split()) - set(after_files.split()), said


@needs_namespaces
def test_cleaning_removes_caches_and_nothing_else():
    removed, said = clean("--yes")
    assert removed == REMOVED | RAY
    assert "/tmp/home/atc_data (left alone: a link)" in said


@needs_namespaces
def test_cleaning_a_dry_run_and_named_groups():
    removed, said = clean("--dry-run")
    assert removed == set() and all(path in said for path in REMOVED | RAY) and HUB not in said
    assert clean("--yes hub")[0] == {HUB}
    removed, said = clean("--yes pip", before="export PIP_CACHE_DIR=/tmp/elsewhere")
    assert removed == {"/tmp/home/.cache/pip"} and "PIP_CACHE_DIR=/tmp/elsewhere is not looked at" in said


@needs_namespaces
def test_cleaning_spares_a_running_ray_and_what_it_may_use():
    busy = "/tmp/ray/session_2026-01-02_00-00-00_000000_22"
    raylet = f"(exec -a 'raylet --session-name={Path(busy).name}' sleep 60 >/dev/null 2>&1) & sleep 0.2"
    removed, said = clean("--yes", before=raylet)
    assert removed == (RAY - {busy}) | {"/tmp/home/.cache/pip"}
    assert f"{busy} (left alone: its Ray is running)" in said


@needs_namespaces
def test_cleaning_asks():
    """Yes to the first, no to the second; without a terminal it refuses."""
    setup = CACHES + "mkdir -p .cache/uv\n"
    asked = run_isolated(
        setup,
        "(printf 'y\\nn\\n'; sleep 1) | script -qec 'bash /srv/clean_cache.sh pip' /dev/null; ls .cache",
    )
    assert asked.stdout.count("remove it? [y/N]") == 2
    assert "pip" not in asked.stdout.split("removed: 1")[1] and "uv" in asked.stdout.split("removed: 1")[1]
    refused = run_isolated(CACHES, "bash /srv/clean_cache.sh pip; true")
    assert "no terminal to ask on" in refused.stderr
