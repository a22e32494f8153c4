"""settings/hidden.py: secrets are hidden by their names and forms, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ascend_rl.lint import options as lint_options
from ascend_rl.lint.verl_config import keys, resolve
from ascend_rl.settings import hidden

ROOT = Path(__file__).resolve().parent.parent
SECRET = "s3cr3t-do-not-tell"

NAMES = """
HF_TOKEN HUGGING_FACE_HUB_TOKEN TOKEN GITLAB_TOKEN_RO HF_TOKEN_2 RAY_AUTH_TOKEN CLUSTER_TOKEN
AWS_SESSION_TOKEN hfToken WANDB_API_KEY OPENAI_KEY API_KEY APIKEY apiKey AWS_ACCESS_KEY_ID
AWS_SECRET_ACCESS_KEY SSH_PRIVATE_KEY MY_KEY SWANLAB_API_KEY COS_SECRETKEY AZURE_STORAGE_ACCOUNT_KEY
ENCRYPTION_KEY GITHUB_PAT PAT GIT_PAT_RW_SECRET SMTP_PWD DB_PWD REDIS_PASSWORD MYSQL_PASS MYSQL_PW
PGPASSWORD SUDO_PASSWD VAULT_PASSPHRASE GIT_CREDENTIALS BASIC_AUTH NPM_AUTH SLACK_WEBHOOK
SLACK_WEBHOOK_URL CLIENT_SECRET SENTRY_DSN AUTHORIZATION MLFLOW_TRACKING_PASSWORD SESSION_COOKIE
""".split()
HARMLESS = """
TOKENIZERS_PARALLELISM MAX_TOKENS NUM_SPECULATIVE_TOKENS MAX_TOKEN PPO_MAX_TOKEN_LEN_PER_GPU
TOKENIZER_PATH AUTH_MODE RAY_AUTH_MODE CLUSTER_TOKEN_FILE PWD OLDPWD SSH_AUTH_SOCK SSH_KEY_PATH PATH
KEYS KEYBOARD MONKEY AUTHOR AUTHORS PATTERN PATCH COMPASS BYPASS_MODE PASS_RATE PROMPT_KEY
TOKEN_BUDGET HCCL_BUFFSIZE PYTHONPATH XDG_SESSION_ID SIGNAL PWDX
""".split()
KEYS = """
data.prompt_key data.reward_fn_key data.image_key data.video_key data.custom_key data.max_token_len
actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.loss_agg_mode
algorithm.pass_k actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.pass_config
critic.eos_token_id trainer.pad_token actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
algorithm.rollout_correction.bypass_mode reward.token_level_rewards trainer.project_name
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_secret_names(name):
    assert hidden.variable(name, SECRET) == "(set)" and hidden.variable(name, "") == ""
    assert hidden.word(f"+a.b.{name.lower()}={SECRET}") == f"+a.b.{name.lower()}=(set)"
    assert SECRET not in hidden.text(f'{{"env_vars": {{"{name}": "{SECRET}", "A": "1"}}}}')
    assert SECRET not in " ".join(hidden.words([f"--{name.lower().replace('_', '-')}", SECRET]))


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_names(name):
    assert hidden.variable(name, "prompt") == "prompt"


@pytest.mark.parametrize("name", KEYS)
def test_harmless_keys(name):
    assert hidden.word(f"{name}=prompt") == f"{name}=prompt"


def test_the_settings_of_the_frameworks_are_no_secrets():
    """All keys of verl's configurations, and the options of vLLM, Megatron and MindSpeed but its two."""
    names = set(lint_options.mindspeed_options() | set(lint_options.vllm_options()))
    for classes in (lint_options.vllm_classes(), lint_options.megatron_classes()):
        names |= {field for fields in classes.values() for field in fields}
    for config in ("ppo_trainer", "ppo_megatron_trainer"):
        names |= set(keys(resolve("verl.trainer.main_ppo", [f"--config-name={config}"]).config))
    assert len(names) > 1000
    assert {name for name in names if hidden.word(f"{name}=prompt") != f"{name}=prompt"} == {
        *("api_key", "hf_token", "no_hf_token"),
        *("allow_credentials", "no_allow_credentials"),  # True and False are shown
    }
    assert hidden.word("a.allow_credentials=False") == "a.allow_credentials=False"


FORMS = [
    "http://me:{}@proxy:3128",
    "http://{}@proxy:3128",
    "https://me:{}@pypi.example/simple",
    "mysql+pymysql://me:{}@db:3306/mlflow?charset=utf8",
    "socks5h://me:{}@[::1]:1080",
    "me:{}@proxy:3128",
    "http://me:a@{}@proxy:3128",
    "me:a@{}@proxy:3128",
    "https://host/path?token={}",
    "http://proxy:3128/?token={}",
    "docker run -e env:TOKEN={} image",
    "https://host/path?n=1&access_token={}&m=2",
    "https://host/x?X-Amz-Signature={}&X-Amz-Date=1",
    "s3://bucket?api_key={}#x",
    "redis-server --requirepass x --password {} --port 1",
    "--api-key={} --model x",
    "curl -H 'Authorization: Bearer {}' host",
    "{{env_vars:{{WANDB_API_KEY:{},A:1}}}}",
    "AccountName=x;AccountKey={};Suffix=y",
    "host=db password={} user=me",
]


@pytest.mark.parametrize("form", FORMS)
def test_secrets_within_a_value(form):
    shown = hidden.text(form.format(SECRET))
    assert SECRET not in shown and "(set)" in shown
    assert SECRET not in hidden.word("trainer.tracking_uri=" + form.format(SECRET))


@pytest.mark.parametrize(
    "value",
    ["hf_" + "a" * 34, "sk-" + "a1" * 20, "ghp_" + "a" * 36, "github_pat_" + "a" * 40, "AKIA" + "A" * 16],
)
def test_tokens_of_known_services(value):
    assert hidden.variable("NOTES", f"use {value} here") == "use (set) here"


PLAIN = [
    "http://proxy:3128/path?n=1&max_tokens=4",
    "git@github.com:owner/name.git",
    "ssh://host:22/x",
    "registry/image:tag@sha256:0123abcd",
    "[console,file]",
    "{method: sam, num_speculative_tokens: 3}",
    "10.0.0.1:6379,10.0.0.2:6379",
    "/usr/bin:/bin:/opt/x@2/bin",
    "token-mean",
    "1e-6",
    "--max-tokens 5 --tokenizer x",
    "",
]


@pytest.mark.parametrize("value", PLAIN)
def test_other_values_stay(value):
    assert hidden.text(value) == value and hidden.word(f"a.b={value}") == f"a.b={value}"


def test_the_dry_runs_of_a_recipe_and_of_the_launcher_hide_them(tmp_path):
    """One predicate: both print no secret of the environment, of a URL, or of an override."""
    urls = {"HTTPS_PROXY": f"http://me:{SECRET}@proxy:1", "MLFLOW_TRACKING_URI": f"http://h/?token={SECRET}"}
    environment = os.environ | urls | {"GIT_PAT": SECRET, "DB_PWD": SECRET, "MY_KEY": SECRET, "DRY_RUN": "1"}
    more = [
        f"+trainer.hf_token={SECRET}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={SECRET}",
    ]
    recipe = ["bash", "-c", '. internal/common.sh; train some.module data.prompt_key=prompt "$@"', "x", *more]
    launcher = ["bash", "ray_start_npu.sh", "internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh"]
    environment |= {"RAY_START_ARGS": f"--redis-password={SECRET}", "OUTPUT_DIR": str(tmp_path)}
    for command in (recipe, [*launcher, *more]):
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert SECRET not in run.stdout + run.stderr and "(set)" in run.stdout
        if command is recipe:
            shown = json.loads(run.stdout)
            assert shown["args"][0] == "data.prompt_key=prompt"
            assert shown["env"]["HTTPS_PROXY"] == "http://(set)@proxy:1"
