"""Hide secrets in what is printed: environments, commands, overrides.

A value is hidden by its name (HF_TOKEN, SMTP_PWD, trainer.api_key), or in part by its form: the user of a
URL, a parameter of one (?token=...), an option (--password ...), a header (Bearer ...), or a token of a known
service. Names are judged word by word: MAX_TOKENS, TOKENIZERS_PARALLELISM, eos_token_id, AUTH_MODE and
data.prompt_key have no secret. In doubt a value is hidden.

Only the standard library: `train` in internal/common.sh runs this file by any Python, and prints {"module",
"args", "env"} of the arguments and the environment.
"""

from __future__ import annotations

import json
import os
import re
import sys

HIDDEN = "(set)"
ALWAYS = set(
    "secret secrets password passwords passwd passphrase passcode pswd credential credentials accesskey "
    "secretkey privatekey bearer jwt cookie cookies webhook authorization".split()
)
LAST = {"pass", "pwd", "pat", "pw", "sig", "signature", "sas", "dsn"}  # as the last word only
JOINED = "(password|passwd|secret|apikey|.token)$"
OF_SECRETS = ("access", "api", "secret", "private", "auth", "encryption")
# Of a token or a key that is none: the word before it, the word behind it.
COUNTED = set(
    "max min num per total prompt response eos bos pad unk cls sep mask image video audio special stop "
    "start end think batch step first last new next one each single".split()
)
MEASURED = set(
    "len length limit count id ids level budget mean sum num size rate ratio parallelism per type mode "
    "cache weight reward rewards loss logprob logprobs file path dir sock method host url threshold "
    "baseline".split()
)
COLUMNS = set(
    "prompt reward fn image images video videos audio label answer data input output response text sort "
    "group index uid truth messages tools tool column metric public batch state multi modal sample id "
    "teacher thinking".split()
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
USER = re.compile(r"(\w[\w+.-]*://)[^\s/?#'\"]+@")
BARE_USER = re.compile(r"(?<![\w/])[^\s/@:='\",]+:[^\s/'\",]+@(?!sha256)(?=[\w.-])")
HEADER = re.compile(r"\b(Bearer|Basic)\s+[^\s'\"]+", re.I)
KNOWN = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}(\.[\w-]*)?)"
)
# name=value, "name": value, --name value; in a query, a mapping or a command line.
PAIRS = [
    re.compile(rf"([A-Za-z][\w.-]*)(['\"]?\s*{mark}\s*['\"]?)((?!//)[^\s,;&?'\"{{}}]+)") for mark in "=:"
]
OPTION = re.compile(r"(--?([A-Za-z][\w-]*) +['\"]?)([^\s'\"-][^\s'\"]*)")


def is_secret(name: str) -> bool:
    """Whether the value of a variable, an option or a key, by the last part of its name, is a secret.

    >>> [is_secret(name) for name in ("HF_TOKEN", "GIT_PAT", "trainer.api_key", "data.prompt_key")]
    [True, True, True, False]
    """
    if name in ("PWD", "OLDPWD"):
        return False
    words = [word.lower() for word in WORD.findall(name.lstrip("+~").rpartition(".")[2])]
    if not words or words[-1] in ("file", "path", "dir", "sock"):
        return False
    if ALWAYS & set(words) or words[-1] in LAST or any(re.search(JOINED, word) for word in words):
        return True
    for index, word in enumerate(words):
        before, after = ["", *words][index], [*words, ""][index + 1]
        # Of an option's name: moe_token_dispatcher_type, apply_query_key_layer_scaling.
        elsewhere = name.islower() and not re.fullmatch(r"\d*|ro|rw|value", " ".join(words[index + 1 :]))
        if word in ("token", "auth") and not elsewhere and before not in COUNTED and after not in MEASURED:
            return True
        if word == "key" and before in OF_SECRETS:
            return True
        if word == "key" and not elsewhere and before not in COLUMNS and after not in MEASURED:
            return not name.startswith("data.")
    return False


def text(value: str) -> str:
    """The value, without the secrets in it.

    >>> text("http://me:word@proxy:3128/?token=abc&n=1")
    'http://(set)@proxy:3128/?token=(set)&n=1'
    """
    value = USER.sub(rf"\1{HIDDEN}@", value)
    value = BARE_USER.sub(f"{HIDDEN}@", value)
    value = HEADER.sub(rf"\1 {HIDDEN}", value)
    value = KNOWN.sub(HIDDEN, value)
    for pair in PAIRS:
        value = pair.sub(lambda m: m[1] + m[2] + (HIDDEN if is_secret(m[1]) else m[3]), value)
    return OPTION.sub(lambda m: m[1] + (HIDDEN if is_secret(m[2]) else m[3]), value)


def variable(name: str, value: str) -> str:
    """What may be shown of a variable."""
    open_secret = value.lower() in ("", "0", "1", "true", "false", "null", "none")
    return HIDDEN if is_secret(name) and not open_secret else text(value)


def word(argument: str) -> str:
    """What may be shown of an argument: an override, an option with a value, or anything else.

    >>> word("+trainer.hf_token='a b'"), word("data.prompt_key=prompt")
    ('+trainer.hf_token=(set)', 'data.prompt_key=prompt')
    """
    name, equals, value = argument.partition("=")
    if equals and re.fullmatch(r"[+~-]*[\w.@/-]+", name):
        return f"{name}={variable(name, value)}"
    return text(argument)


def words(arguments: list[str]) -> list[str]:
    """What may be shown of a command: also the value that follows an option."""
    shown = [word(argument) for argument in arguments]
    for index, argument in enumerate(arguments[:-1]):
        if re.fullmatch(r"--?[A-Za-z][\w-]*", argument) and is_secret(argument):
            shown[index + 1] = HIDDEN
    return shown


if __name__ == "__main__":
    environment = {name: variable(name, value) for name, value in os.environ.items()}
    print(json.dumps({"module": sys.argv[1], "args": words(sys.argv[2:]), "env": environment}))
