"""`pipeinfer doctor`: it foretells what `serve` does, in its exit code and in the words of why."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from checkpoints import make_checkpoint
from pipeinfer import topology as topologies
from pipeinfer.cli.main import _running_targets, main
from pipeinfer.messages import Heartbeat
from pipeinfer.settings import Settings
from servers import environment


def test_a_host_that_can_serve_is_well_and_what_would_be_chosen_is_said(capsys, tmp_path):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    asked = [str(tmp_path), "--port", "0", "--device", "cpu", "--page-size", "32"]
    assert main(["doctor", *asked, "--served-model-name", "small"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ok +model +small: \d+ layers, float32, on cpu, attention torch", said, re.M)
    assert "pages of 32 tokens" in said
    assert said.endswith("`pipeinfer serve` would start\n")


@pytest.mark.parametrize("flag", ["--model", "--model-path"])
def test_a_model_behind_the_flag_of_another_server_is_looked_at(capsys, tmp_path, flag):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    asked = [flag, str(tmp_path), "--port", "0", "--device", "cpu"]
    assert main(["doctor", *asked, "--served-model-name", "small"]) == 0
    assert re.search(r"^ok +model +small: ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    "asked",
    [
        ["--max-model-len", "100000"],
        ["/there/is/no/model"],
        ["--page-size", "many"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_in_the_way_is_said_in_the_words_of_serve(capsys, asked):
    assert main(["doctor", *asked, "--port", "0", "--device", "cpu"]) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad")]
    assert len(bad) == 1
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "serve", *asked, "--port", "0", "--device", "cpu"],
        env=environment(), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"error: {bad[0].split(maxsplit=2)[2]}\n" in done.stderr


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 133466304\n"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer.json", "{}", "cannot read .*tokenizer.json"),
        ("generation_config.json", '{"temperature": -1}', "generation_config.json: temperature"),
        ("model.safetensors", POINTER, "model.safetensors is a Git LFS pointer"),
        ("config.json", POINTER, "config.json is a Git LFS pointer"),
    ],
)
def test_files_that_serve_could_not_read_are_in_the_way(capsys, tmp_path, file, text, said):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    (tmp_path / file).write_text(text)
    assert main(["doctor", str(tmp_path), "--port", "0", "--device", "cpu"]) == 1
    assert re.search(rf"^bad .*{said}", capsys.readouterr().out, re.M)


def test_an_adapter_alone_is_no_model(capsys, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert main(["doctor", str(tmp_path), "--port", "0", "--device", "cpu"]) == 1
    assert "is an adapter of org/base, not a model" in capsys.readouterr().out


def test_a_working_directory_that_is_gone_is_said(capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["doctor", "--port", "0", "--device", "cpu"]) == 2
    assert "the working directory does not exist any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "beside streams up to 25 ms, so that prompts wait at most 0.5 s"),
        (["--itl-target", "0"], "beside streams as long as it takes, so that"),
        (["--ttft-target", "0"], "no --ttft-target: those beside streams are short"),
        (["--mixed-step-tokens", "500"], "beside streams of 500 tokens, without targets"),
        (["--policy", "decode-first"], "as the policy decode-first composes them"),
    ],
)
def test_how_long_steps_beside_streams_may_be_is_said(capsys, asked, said):
    assert main(["doctor", *asked, "--port", "0", "--device", "cpu"]) == 0
    assert re.search(rf"^ok +steps +{said}", capsys.readouterr().out, re.M)


def test_what_a_standby_takes_is_said_where_one_is_asked_for(capsys):
    asked = ["doctor", "--port", "0", "--device", "cpu"]
    assert main([*asked, "--standby"]) == 0
    [line] = re.findall(r"^note +standby +(.*)", capsys.readouterr().out, re.M)
    assert "a second process of each engine" in line and "memory for pages" in line
    assert main(asked) == 0
    assert "standby" not in capsys.readouterr().out


def test_a_port_that_is_taken_is_in_the_way(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--port", port, "--device", "cpu"]) == 1
    told = f"bad   port       --port {port}: 127.0.0.1:{port} is taken by process {os.getpid()} "
    assert told in capsys.readouterr().out


def test_a_long_folder_for_temporary_files_is_in_the_way(capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 90)
    assert main(["doctor", "--port", "0", "--device", "cpu"]) == 1
    assert re.search(r"^bad +sockets .*TMPDIR", capsys.readouterr().out, re.M)


def test_a_scheduler_that_still_starts_beside_it_is_no_reason_to_fail(monkeypatch, tmp_path):
    """Its heartbeats say nothing yet of what was measured."""
    topology = topologies.local(Settings(), f"ipc://{tmp_path}/")
    said = {"target_step_tokens": 512.0, "target_prompt_rate": 1e4}

    def hear(stats):
        def listen(caller, health, seconds, enough):
            beat = Heartbeat("scheduler-0", "scheduler", 0, 0, 0, 7, 1, "starting", "", stats)
            health.on_heartbeat(beat, 1.0)
            assert enough(beat) == bool(stats)

        monkeypatch.setattr("pipeinfer.cli.top.listen", listen)
        return list(_running_targets(topology))

    assert hear({}) == []
    [(kind, name, text)] = hear(said)
    assert (kind, name) == ("note", "targets") and text.startswith("scheduler-0: ")
