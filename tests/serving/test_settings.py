"""Where options come from, which of them wins, and what is refused."""

import re
from collections import Counter

import pytest

from peagle_jax.config import ConfigError
from peagle_jax.options import options_of
from serving.settings import Settings, engine_config, num_bytes
from serving.sources import PREFIX, parser, resolve

NAMES = list(options_of(Settings))


def settings(*arguments: str, **environment: str) -> Settings:
    return resolve(arguments, environment)[0]


@pytest.fixture
def file(tmp_path):
    """Writes a YAML file and returns the arguments that name it."""

    def write(text: str) -> list[str]:
        (tmp_path / "server.yaml").write_text(text)
        return ["--config", str(tmp_path / "server.yaml")]

    return write


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(file):
    arguments = file("max-num-seqs: 2\nmax-waiting: 3\nport: 4\n")
    environment = {"PEAGLE_MAX_NUM_SEQS": "10", "PEAGLE_MAX_WAITING": "30", "HOME": "/"}
    found, sources = resolve([*arguments, "--max-num-seqs", "20"], environment)
    assert (found.max_num_seqs, found.max_waiting, found.port) == (20, 30, 4)
    assert found.max_model_len == Settings().max_model_len
    assert sources["max_num_seqs"] == "command line"
    assert sources["max_waiting"] == "environment"
    assert sources["port"] == f"file {arguments[1]}"
    assert sources["max_model_len"] == "default"


def test_as_many_logprobs_as_openai_allows_are_served_by_default():
    assert settings().max_logprobs == 20


def test_the_file_may_be_named_by_the_environment_or_the_command_line(file, tmp_path):
    _, path = file("port: 4")
    assert settings(PEAGLE_CONFIG=path).port == 4
    other = tmp_path / "other.yaml"
    other.write_text("port: 5")
    assert settings("--config", str(other), PEAGLE_CONFIG=path).port == 5


def test_every_option_exists_in_all_three_places(file):
    """With a value that is not its default, and so must come from where it was written."""
    special = dict(method="eagle3", dtype="float32", quantization="fp8", activations="fp8")
    special |= dict(kv_cache_memory="1GiB", kv_cache_dtype="fp8", gather="library", adaptive="off")
    special |= dict(log_level="debug", unknown_fields="refuse", reply_format="none", page=False)
    special |= dict(reflection=True, no_cache=True, prefix_caching=False, prompt_logprobs=True)
    special |= dict(saved_rings=5, prefill_chunk=77, prefill_rows=3, max_num_seqs=9)
    special |= dict(allowed_origins="http://a:1")
    special |= dict(max_connections=7, max_connections_per_address=3, small_prefills=True)
    special |= dict(selector=False, draft_sampling="sample", verify_method="token")
    special |= dict(ready="first", compile_only=True)
    tls = dict(tls_cert="cert", tls_key="key", tls_client_ca="ca")
    together = dict.fromkeys(tls, tls)
    for name in NAMES:
        default = getattr(Settings(), name)
        value = special.get(name, default + 1 if isinstance(default, int | float) else "text")
        given = {name: value} | together.get(name, {})
        words = {key.replace("_", "-"): value for key, value in given.items()}
        switches = {True: "--{}", False: "--no-{}"}
        flags = [
            switches[value].format(word) if isinstance(value, bool) else f"--{word}={value}"
            for word, value in words.items()
        ]
        environment = {PREFIX + key.upper(): str(text) for key, text in given.items()}
        yaml = "".join(f"{key.replace('_', '-')}: {text}\n" for key, text in given.items())
        expected = Settings(**given)
        assert expected != Settings()
        assert settings(*flags) == settings(**environment) == settings(*file(yaml)) == expected


@pytest.mark.parametrize(
    ("first", "name"),
    [("--method=none", "draft-sampling=sample"), ("--no-prefix-caching", "saved-rings=3")],
)
def test_an_option_without_effect_is_refused_by_name(first, name):
    with pytest.raises(ConfigError, match=f"{name} .* has no effect"):
        settings(first, f"--{name}")


def test_k_has_the_short_option_of_the_other_commands():
    assert settings("-K", "3") == settings("--num-speculative-tokens", "3")


def test_the_load_chooses_k_unless_k_is_fixed():
    adaptive = lambda *words: engine_config(settings(*words)).adaptive
    assert adaptive() == adaptive("--adaptive", "load") == "load"
    assert adaptive("--adaptive", "off") == "off"
    with pytest.raises(ConfigError, match="ADAPTIVE"):
        settings(PEAGLE_ADAPTIVE="fast")
    with pytest.raises(ConfigError, match="has no effect"):
        settings("--method", "none", "--adaptive", "load")
    assert settings("--method", "none", "--adaptive", "off").adaptive == "off"


def test_negations_and_words_for_truth(file):
    assert settings("--no-reflection").reflection is False
    for text, value in (("1", True), ("TRUE", True), ("no", False), ("0", False)):
        assert settings(PEAGLE_REFLECTION=text).reflection is value
    assert settings(*file("reflection: off")).reflection is False
    assert settings(*file("reflection: null\nmodel:\n")) == Settings()
    assert settings(*file("# nothing\n")) == Settings()


PLAIN = "is not a plain decimal number"
BY_TAG = "cannot be read as YAML (the value does not fit its tag)"
BAD_FILES = {
    "max-nums-seqs: 2": "line 1: max-nums-seqs: there is no option 'max_nums_seqs'",
    "port: 1\nport: 2": "line 2: port: stands there twice",
    "max-n: 1\nmax_n: 2": "line 2: max_n: stands there twice",
    "config: other.yaml": "there is no option 'config'",
    "port: 1.5": "port: '1.5' must be a whole number",
    "port: true": "port: True must be a whole number",
    "port: [1]": "port: [1] must be a whole number",
    "host: {a: 1}": "must be a text",
    "dtype: float16": "'float16' must be one of auto, float32, bfloat16",
    "no-cache: perhaps": "'perhaps' must be true or false",
    "port: [": "cannot be read as YAML",
    "port: 080": f"line 1: port: 080 {PLAIN}",
    "port: '010'": f"port: 010 {PLAIN}",
    "drain-seconds: 1:30": f"drain-seconds: 1:30 {PLAIN}",
    "port: 1\nhost: [a\nmodel: b": "line 3: expected ',' or ']'",
    "port: 1\n\tmodel: b": "line 2: found",
    "port: *a": "line 1: found undefined alias",
    "port: 1\n--- \nport: 2": "line 2: but found another document",
    "[" * 100_000: "nested too deeply",
    "reflection: !!bool some": BY_TAG,
    "kv-cache-memory: " + "9" * 400: "must be a size",
}


@pytest.mark.parametrize(("text", "word"), BAD_FILES.items())
def test_a_file_that_is_wrong_is_refused_with_its_place(file, text, word):
    arguments = file(text)
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    assert word in str(caught.value)
    assert arguments[1] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_of_the_file_is_taken_as_it_is_written(file):
    yaml = "served-model-name: 010\nhost: no\nmodel: 1.10\ndrafter: 2026-11-22\n"
    found = settings(*file(yaml))
    assert (found.served_model_name, found.host) == ("010", "no")
    assert (found.model, found.drafter) == ("1.10", "2026-11-22")


def test_decimal_numbers_of_the_file(file):
    found = settings(*file("port: +0\ndrain-seconds: 1e1\nstats-seconds: 2.50\nmax-n: '3'\n"))
    assert (found.port, found.drain_seconds, found.stats_seconds, found.max_n) == (0, 10, 2.5, 3)


def test_a_whole_number_may_be_written_with_a_point_everywhere(file):
    for arguments, environment in (
        (file("max-n: 7.0"), {}),
        ([], {"PEAGLE_MAX_N": "7.0"}),
        (["--max-n", "7.0"], {}),
    ):
        found = resolve(arguments, environment)[0].max_n
        assert (type(found), found) == (int, 7)
    for text in ("7.5", "inf", "nan", "seven"):
        with pytest.raises(ConfigError, match="must be a whole number"):
            resolve([], {"PEAGLE_MAX_N": text})


def test_a_foreign_host_is_refused_on_loopback_without_tokens():
    assert Settings().hosts == ["127.0.0.1"]
    assert Settings(host="0.0.0.0").hosts is None
    assert Settings(auth_token_file="a").hosts is None
    assert Settings(allowed_hosts="a.example, b").hosts == ["127.0.0.1", "a.example", "b"]
    assert "a.example" in Settings(host="0.0.0.0", allowed_hosts="a.example").hosts


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("MAX_NUM_SEQ", "2", "variable PEAGLE_MAX_NUM_SEQ: there is no option 'max_num_seq'"),
        ("PORT", "x", "variable PEAGLE_PORT: 'x' must be a whole number"),
        ("METHOD", "medusa", "must be one of peagle, eagle3, dflash, none"),
        ("TLS_CERT", "", "tls_cert='' must be left out or given"),
        ("SERVICE_PORT", "50051", "enableServiceLinks: false"),
        ("SERVE_PORT_50051_TCP_ADDR", "10.0.0.1", "enableServiceLinks: false"),
    ],
)
def test_a_variable_that_is_wrong_is_refused_by_name(variable, value, word):
    with pytest.raises(ConfigError, match=word):
        settings(**{PREFIX + variable: value})


def test_a_broken_rule_is_refused_with_its_place(file, capsys):
    with pytest.raises(ConfigError, match=r"variable PEAGLE_MAX_N: max_n=0 must be at least 1"):
        settings(PEAGLE_MAX_N="0")
    with pytest.raises(ConfigError, match=r"server\.yaml, line 2: max-n: max_n=0 must be"):
        settings(*file("port: 4\nmax-n: 0"))
    with pytest.raises(SystemExit):
        settings("--max-n", "0")
    assert "argument --max-n: max_n=0 must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["x", "0"])
def test_a_mistake_is_refused_even_where_another_source_decides(file, value):
    with pytest.raises(ConfigError, match="variable PEAGLE_MAX_N"):
        settings("--max-n", "4", PEAGLE_MAX_N=value)
    with pytest.raises(ConfigError, match=r"server\.yaml, line 1"):
        settings(*file(f"max-n: {value}"), PEAGLE_MAX_N="4")


def test_only_the_given_environment_is_read(monkeypatch):
    for variable in ("PEAGLE_PORT", "PORT", "port"):
        monkeypatch.setenv(variable, "5")
    assert settings().port == Settings().port == 50051
    assert resolve([])[0].port == 5


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (dict(port=65536), "port=65536"),
        (dict(port=8000), "http_port=8000"),
        (dict(max_message_mib=0), "max_message_mib=0"),
        (dict(max_connections_per_address=-1), "max_connections_per_address=-1"),
        (dict(max_request_seconds=float("nan")), "max_request_seconds=nan"),
        (dict(stats_seconds=float("inf")), "stats_seconds=inf"),
        (dict(kv_cache_memory="8 gigs"), "must be a size"),
        (dict(tls_cert="a"), "tls_cert and tls_key belong together"),
        (dict(tls_client_ca="a"), "tls_client_ca"),
        (dict(method="none", drafter="a"), "takes no drafter"),
    ],
)
def test_values_out_of_range_are_refused_by_name(given, word):
    with pytest.raises(ConfigError, match=word):
        Settings(**given)


def test_reflection_is_offered_on_loopback_by_default():
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0"):
        assert Settings(host=host).offers_reflection is (host != "0.0.0.0")
        assert Settings(host=host, reflection=True).offers_reflection is True
        assert Settings(host=host, reflection=False).offers_reflection is False


def test_open_doors_are_warned_of():
    tls = dict(tls_cert="cert", tls_key="key")
    assert Settings().warnings == []
    assert "may use the model" in Settings(host="0.0.0.0").warnings[0]
    assert "may use the model" in Settings(host="0.0.0.0", **tls).warnings[0]
    assert "unencrypted" in Settings(host="0.0.0.0", auth_token_file="a").warnings[0]
    assert Settings(host="0.0.0.0", auth_token_file="a", **tls).warnings == []
    assert Settings(host="0.0.0.0", tls_client_ca="a", **tls).warnings == []


def test_help_tells_of_every_option_once_with_its_default():
    text = parser().format_help()
    options = text[text.index("\nengine, all of") :]
    shown = Counter(re.findall(r"^  --([\w-]+)[\s,]", options, re.MULTILINE))
    assert {name: shown[name.replace("_", "-")] for name in NAMES} == dict.fromkeys(NAMES, 1)
    flat = " ".join(text.split())
    for value in ("50051", "1024", "127.0.0.1", "60", "info"):
        assert f"(default: {value})" in flat


def test_what_is_in_force_is_printed_but_no_secret(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("open-sesame\n")
    found, sources = resolve(["--auth-token-file", str(tokens), "--port", "5"], {})
    lines = found.lines(sources)
    assert "port: 5  (command line)" in lines
    assert "max-waiting: 1024  (default)" in lines
    assert len(lines) == len(NAMES)
    assert "sesame" not in "\n".join(lines)


def test_sizes():
    sizes = {"1": 1, "8GiB": 8 << 30, "500MB": 500_000_000, "1.5 kib": 1536}
    assert {text: num_bytes(text) for text in sizes} == sizes
