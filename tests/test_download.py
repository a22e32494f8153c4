"""Named data sets and weights from a hub: in their published forms, cut off, and damaged on the way.

The hubs here are servers of this machine that answer as Hugging Face's and ModelScope's do. Hugging Face
names a large file by its sha256, a small one by git's sha1 of it; ModelScope lists sizes and sha256.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ascend_rl.recipe.data import DATASETS

PROBLEMS = 30
BROKEN_OFF = 1000  # bytes, then the connection ends


def parquet(rows: list[dict]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def aime(i: int) -> dict:
    return {
        "data_source": "aime",
        "prompt": [{"role": "user", "content": f"Solve number {i}. The last line is Answer: $Answer."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(i), "raw_problem": f"number {i}", "split": None},
    }


def math500(i: int) -> dict:
    taken = {"problem": f"What is ${i}/2$?", "solution": f"It is $\\boxed{{{i / 2}}}$.", "answer": f"{i / 2}"}
    return taken | {"subject": "Prealgebra", "level": 1, "unique_id": f"test/prealgebra/{i}.json"}


GSM8K = [
    {"question": f"{i} and {i}?", "answer": f"<<{i}+{i}={2 * i}>>\n#### {2 * i}"} for i in range(PROBLEMS)
]
FILES = {
    "aime": (
        "BytedTsinghua-SIA/AIME-2024",
        "data/aime-2024.parquet",
        parquet([aime(i) for _ in range(32) for i in range(PROBLEMS)]),  # as published: each 32 times
    ),
    "gsm8k": ("openai/gsm8k", "main/test-00000-of-00001.parquet", parquet(GSM8K)),
    "math500": (
        "HuggingFaceH4/MATH-500",
        "test.jsonl",
        "".join(json.dumps(math500(i)) + "\n" for i in range(PROBLEMS)).encode(),
    ),
}


class Hub(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        places = {f"/datasets/{repo}/resolve/main/{file}": name for name, (repo, file, _) in FILES.items()}
        if self.path not in places:
            self.send_error(404)
            return
        name = places[self.path]
        content = FILES[name][2]
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if self.headers["Range"] else 200)
        self.send_header("X-Repo-Commit", 40 * "a")
        if name == "math500":
            sha = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        else:
            sha = hashlib.sha256(content).hexdigest()
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{sha}"')
        self.send_header("ETag", f'"{sha}"')
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.begins.append(begin)
        if self.server.damages:
            content = content[:-100] + bytes(100)
        self.wfile.write(content[begin:BROKEN_OFF] if self.server.breaks_off else content[begin:])


@pytest.fixture
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.begins, server.damages, server.breaks_off = [], False, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def load(hub, home, name: str, source: str = "hf", **more: str) -> subprocess.CompletedProcess:
    """As ``python -m ascend_rl.evaluate`` gets a named data set, up to its problems."""
    program = f"""
from ascend_rl.recipe.evaluate import CannotWork, load
try:
    print(*sorted(each.answer for each in load({name!r}, {source!r})[1]))
except CannotWork as error:
    exit(f"ERROR: {{error}}")
"""
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home)}
    environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | more
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", FILES)
def test_what_is_published_is_loaded_once(hub, tmp_path, name):
    wanted = {
        "aime": [str(i) for i in range(PROBLEMS)],
        "gsm8k": [str(2 * i) for i in range(PROBLEMS)],
        "math500": [f"{i / 2}" for i in range(PROBLEMS)],
    }[name]
    for _ in range(2):
        run = load(hub, tmp_path, name)
        assert run.stdout.split() == sorted(wanted), run.stderr
    assert hub.begins == [0]


def test_what_a_hub_does_not_have(hub, tmp_path):
    """The command that prepares data says so in a line."""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path),
    }
    environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [
        sys.executable,
        "-m",
        "ascend_rl.data",
        "deepscaler",
        "--out",
        tmp_path / "out",
        "--source",
        "hf",
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "agentica-org/DeepScaleR-Preview-Dataset cannot be fetched from hf" in run.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_and_not_kept(hub, tmp_path, name):
    hub.damages = True
    run = load(hub, tmp_path, name)
    assert run.returncode == 1 and "is damaged" in run.stderr and "Traceback" not in run.stderr
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".parquet", ".jsonl")]
    hub.damages = False
    run = load(hub, tmp_path, name)
    assert run.returncode == 0 and len(run.stdout.split()) == PROBLEMS, run.stderr


def test_a_download_that_broke_off_leaves_nothing_to_be_read(hub, tmp_path):
    hub.breaks_off = True
    run = load(hub, tmp_path, "aime")
    assert run.returncode == 1 and "cannot be fetched from hf" in run.stderr and "Traceback" not in run.stderr
    assert not [*tmp_path.rglob("*.parquet")]
    hub.breaks_off = False
    run = load(hub, tmp_path, "aime")
    assert run.returncode == 0 and len(run.stdout.split()) == PROBLEMS, run.stderr


ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json vocab.json merges.txt"
).split()
SHARDS = [f"model-{i}.safetensors" for i in (1, 2)]
INDEX = {"weight_map": {f"layer.{i}": shard for i, shard in enumerate(SHARDS)}}
WEIGHTS = {name: json.dumps({"file": name}).encode() for name in SMALL}
WEIGHTS["model.safetensors.index.json"] = json.dumps(INDEX).encode()
WEIGHTS |= {shard: bytes(range(256)) * 40 + shard.encode() for shard in SHARDS}


class ModelScope(Hub):
    """The calls of a download: the list of a model's files, and one file of it, or of a data set."""

    def answer(self):
        path, _, query = self.path.partition("?")
        name = urllib.parse.parse_qs(query).get("FilePath", [""])[0]
        sets = {DATASETS[key].modelscope: (file, content) for key, (_, file, content) in FILES.items()}
        owned = "/".join(path.split("/")[4:6])
        lists = {"/api/v1/models/Qwen/Tiny/repo/files": WEIGHTS.items()}
        lists |= {f"/api/v1/datasets/{repo}/repo/tree": [one] for repo, one in sets.items()}
        if path in lists:
            files = [
                {"Path": file, "Name": file, "Type": "blob", "Size": len(content),
                 "Sha256": hashlib.sha256(content).hexdigest(), "Revision": 40 * "a", "Mode": "33188"}
                for file, content in lists[path]
            ]  # fmt: skip
            content = json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode()
        elif path == "/api/v1/models/Qwen/Tiny/repo" and name in WEIGHTS:
            content = WEIGHTS[name]
        elif path == f"/api/v1/datasets/{owned}/repo" and name == sets.get(owned, ("",))[0]:
            content = sets[owned][1]
        else:
            self.send_error(404)
            return
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if self.headers["Range"] else 200)
        if self.headers["Range"]:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name:
            self.server.begins.append((name, begin))
        last = name and name not in (*SMALL, SHARDS[0], "model.safetensors.index.json")
        if last and self.server.damages:
            content = content[:-100] + bytes(100)
        self.wfile.write(content[begin:BROKEN_OFF] if last and self.server.breaks_off else content[begin:])


@pytest.fixture(scope="module")
def modelscope(tmp_path_factory) -> dict[str, str]:
    """The environment of somebody with the pinned `modelscope`, which the recipes' image has."""
    place = tmp_path_factory.mktemp("modelscope")
    lock = (ROOT / "requirements.txt").read_text().split()
    pins = [line for line in lock if line.startswith(("modelscope==", "modelscope-hub=="))]
    assert len(pins) == 2
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, *pins]
    subprocess.run(install, check=True, timeout=600)
    path = f"{place}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(place), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.fixture
def scope(modelscope, tmp_path):
    """A hub of this machine, and the environment of somebody who uses it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ModelScope) as server:
        server.begins, server.damages, server.breaks_off = [], False, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = {"MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        patience = {"MODELSCOPE_DOWNLOAD_RETRY_MAX_DELAY_SECONDS": "1"}
        yield server, modelscope | address | patience | {"HOME": str(tmp_path)}
        server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weekly] * (name != "gsm8k")) for name in FILES]
)
def test_data_sets_of_modelscope(scope, tmp_path, name):
    """What is published is loaded, once; what broke off or was damaged on the way is not, and is not kept."""
    server, environment = scope
    for fault in ("breaks_off", "damages"):
        setattr(server, fault, True)
        run = load(server, tmp_path, name, "modelscope", **environment)
        assert run.returncode == 1 and "cannot be fetched from modelscope" in run.stderr
        assert "Traceback" not in run.stderr
        setattr(server, fault, False)
    for asked in (True, False):
        server.begins.clear()
        run = load(server, tmp_path, name, "modelscope", **environment)
        assert run.returncode == 0 and len(run.stdout.split()) == PROBLEMS, run.stderr
        assert bool(server.begins) == asked


@pytest.fixture
def weights(scope, tmp_path):
    """Calls download_weights.sh for Qwen/Tiny; returns its run and what it wrote."""
    server, environment = scope

    def download(*options: str) -> tuple[subprocess.CompletedProcess, dict[str, bytes]]:
        out = tmp_path / "model"
        command = ["bash", ROOT / "download_weights.sh", "Qwen/Tiny", "--out", out, *options]
        more = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 300}
        run = subprocess.run(command, **more)
        return run, {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}

    return server, download


@pytest.mark.long
def test_weights_arrive_whole_and_once(weights):
    server, download = weights
    for _ in range(2):
        run, files = download()
        assert run.returncode == 0 and files == WEIGHTS, run.stderr
    assert sorted(name for name, _ in server.begins) == sorted(WEIGHTS)


@pytest.mark.long
def test_random_weights_need_no_weights(weights):
    run, files = weights[1]("--random-init")
    assert run.returncode == 0 and sorted(files) == sorted(SMALL), run.stderr


@pytest.mark.long
@pytest.mark.parametrize("fault", ["damages", "breaks_off"])
def test_weights_that_do_not_arrive_are_asked_for_again(weights, fault):
    server, download = weights
    setattr(server, fault, True)
    run, files = download()
    assert run.returncode != 0 and files.get(SHARDS[1]) != WEIGHTS[SHARDS[1]]
    setattr(server, fault, False)
    run, files = download()
    assert run.returncode == 0 and files == WEIGHTS, run.stderr


@pytest.mark.parametrize("setting", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"])
def test_uv_takes_packages_from_where_pip_takes_them(root, tmp_path, setting):
    """build_project.sh installs with uv; its own index is one that nothing listens on here."""
    asked = []

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_): ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/simple"
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index}\n")
        value = str(tmp_path / "pip.conf") if setting == "PIP_CONFIG_FILE" else index
        script = f""". {root}/internal/common.sh; index_of_pip "$0"
            exec "${{0%/*}}/uv" pip install --python "$0" --no-cache --no-config --dry-run not-published"""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        environment |= {"UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "5", "HOME": str(tmp_path), setting: value}
        if setting == "PIP_EXTRA_INDEX_URL":
            environment["UV_DEFAULT_INDEX"] = "http://127.0.0.1:9/simple"
        command = ["bash", "-c", script, sys.executable]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert ran.returncode != 0 and "/simple/not-published/" in asked, (asked, ran.stderr)
