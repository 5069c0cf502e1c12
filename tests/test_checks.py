from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from verl_fapo import checks
from verl_fapo.checks import check_config, check_verl_version
from verl_fapo.errors import SettingsError, UsageError


def test_good_config_passes(good, workshop):
    assert check_config(good("fapo.penalty=0.5")).penalty == 0.5


MISTAKES = [
    pytest.param(["fapo.judge.model=null"], ["judge.model is not set", "fapo.judge.model=/"], id="no judge"),
    pytest.param(["fapo.judge.model=/nowhere/genrm"], ["/nowhere/genrm", "no such folder"], id="wrong judge path"),
    pytest.param(["fapo.judge.model=nowhere"], ["nowhere", "no such folder"], id="wrong relative judge path"),
    pytest.param(["fapo.judge.model='~/genrm'"], ["~/genrm", "no such folder"], id="veRL expands no home"),
    pytest.param(["fapo.judge.model=/tmp/"], ["ends with a slash"], id="slash at the end"),
    pytest.param(["actor_rollout_ref.model.path=null"], ["model.path=None", "expected the path"], id="no policy"),
    pytest.param(["actor_rollout_ref.model.path=/nowhere"], ["actor_rollout_ref.model.path"], id="wrong policy path"),
    pytest.param(["fapo.penalti=1"], ["fapo.penalti", "did you mean fapo.penalty"], id="unknown key"),
    pytest.param(
        ["fapo.judge.template=/nowhere/t.txt"], ["fapo.judge.template='/nowhere/t.txt'", "no such file"], id="template"
    ),
    pytest.param(
        ["fapo.judge.template=setup.cfg"],
        ["fapo.judge.template='setup.cfg', line", "expected {problem}"],
        id="no template",
    ),
    pytest.param(["fapo.judge.template=''"], ["fapo.judge.template=''"], id="no name of a template"),
    pytest.param(["fapo.judge.modle=x"], ["did you mean fapo.judge.model"], id="unknown key in a group"),
    pytest.param(["fapo.penalty=3"], ["fapo.penalty=3", "less than or equal to 2"], id="penalty out of range"),
    pytest.param(["fapo.penalty=high"], ["fapo.penalty='high'"], id="penalty of a wrong type"),
    pytest.param(["fapo.genrm.placement=external"], ["endpoints is empty"], id="external without endpoints"),
    pytest.param(["fapo.genrm.endpoints=[http://h:1]"], ["placement to 'external'"], id="endpoints not used"),
    pytest.param(
        ["fapo.genrm.placement=external", "fapo.genrm.endpoints=[h:1]"], ["http://host:8000"], id="endpoint is no URL"
    ),
    pytest.param(
        ["reward_model.enable=true"], ["reward_model.enable=True", "the setting is fapo.judge.model"], id="legacy key"
    ),
    pytest.param(
        ["reward_model.reward_manager=dapo"], ["the setting is reward.reward_manager.name"], id="legacy manager"
    ),
    pytest.param(
        ["custom_reward_function.path=f.py"],
        ["the setting is reward.custom_reward_function.path"],
        id="legacy function",
    ),
    pytest.param(
        ["fapo.judge.max_tokens=8192"], ["max_position_embeddings=8192", "lower fapo.judge.max_tokens"], id="context"
    ),
    pytest.param(
        ["reward.reward_model.rollout.max_model_len=64"], ["max_model_len=64", "lower"], id="context of the engine"
    ),
    pytest.param(["trainer.v1.trainer_mode=sync"], ["trainer.v1.trainer_mode=fapo_sync"], id="plain trainer mode"),
    pytest.param(["trainer.use_v1=false"], ["trainer.use_v1"], id="old trainer"),
    pytest.param(["reward.reward_manager.name=naive"], ["'naive'", "expected 'fapo'"], id="other reward manager"),
    pytest.param(["reward.reward_model.enable=true"], ["fapo.judge.model"], id="veRL's own reward model"),
    pytest.param(["reward.custom_reward_function.path=f.py"], ["f.py", "remove the override"], id="custom reward"),
    pytest.param(
        ["fapo.genrm.replicas=2"], ["3 devices", "trainer 1 + GenRM 2", "num_gpus=3"], id="too few logical devices"
    ),
    pytest.param(["fapo.penalty=true"], ["fapo.penalty=True"], id="a truth value is no number"),
    pytest.param(["fapo.penalty=nan"], ["fapo.penalty"], id="not a number"),
    pytest.param(["fapo.run_dir=''"], ["fapo.run_dir"], id="no run folder"),
    pytest.param(
        ["fapo.genrm.placement=external", "fapo.genrm.endpoints=['http://h:1/v1']"],
        ["without /v1"],
        id="endpoint with v1",
    ),
    pytest.param(["trainer.n_gpus_per_node=0"], ["trainer.n_gpus_per_node=0"], id="no device"),
    pytest.param(["data.train_files=null"], ["data.train_files=[None]", "expected the path"], id="no training file"),
    pytest.param(["data.train_files=[]"], ["data.train_files=[]"], id="empty list of files"),
    pytest.param(["data.train_files=/tmp"], ["no such file"], id="a folder is no file"),
    pytest.param(
        [
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            "actor_rollout_ref.rollout.n=1",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3",
        ],
        ["ppo_mini_batch_size=3", "2 data-parallel devices"],
        id="mini-batch over the devices",
    ),
    *(
        pytest.param(
            [
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}",
                "trainer.n_gpus_per_node=3",
                "ray_kwargs.ray_init.num_gpus=4",
            ],
            [f"ulysses_sequence_parallel_size={size} does not divide the trainer's 3 devices"],
            id=f"sequences over {size} of 3 devices",
        )
        for size in (2, 8)
    ),
    pytest.param(["data.max_response_length=8000"], ["= 8512", "max_position_embeddings=8192"], id="policy's context"),
    pytest.param(
        ["fapo.judge.on_unknown=neutral", "algorithm.adv_estimator=gae"],
        ["on_unknown='neutral' is not defined", "adv_estimator='gae'", "keep or penalise"],
        id="neutral without groups",
    ),
    pytest.param(
        ["reward.reward_manager.name=fapo_genrm"],
        ["placement='standalone'", "set it to none, and fapo.penalty to 0"],
        id="judge in training with a judge",
    ),
    pytest.param(
        ["fapo.overlong.buffer=600", "data.max_response_length=512"],
        ["fapo.overlong.buffer=600", "max_response_length=512", "set it to 0"],
        id="buffer longer than the response",
    ),
    pytest.param(["fapo.penalty=1", "fapo.rho_shift=1"], ["penalty is 1 and rho_shift is 1"], id="lambda twice"),
    pytest.param(
        ["fapo.genrm.placement=none", "fapo.penalty=1"], ["set penalty to 0, or name a judge"], id="penalty, no judge"
    ),
    pytest.param(
        ["data.max_response_length=8000", "+actor_rollout_ref.model.override_config.max_position_embeddings=16384"],
        ["override_config.max_position_embeddings=16384 does not reach", "reads 8192 in", "write 16384 there"],
        id="context that the rollouts' engine does not see",
    ),
    pytest.param(["data.train_files=/no.parquet"], ["data.train_files='/no.parquet'", "no such file"], id="no data"),
    pytest.param(["data.prompt_key=question"], ["no column 'question'"], id="prompt column missing"),
]


@pytest.mark.parametrize(("overrides", "said"), MISTAKES)
def test_mistake_is_named_in_one_line_with_the_way_out(good, overrides, said):
    with pytest.raises(UsageError) as caught:
        check_config(good(*overrides))
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message


def lacking(name: str):
    def damage(folder: Path) -> None:
        (folder / name).unlink()

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lacking("config.json"), "lacks config.json", id="no config"),
        pytest.param(lacking("model.safetensors"), "lacks weights", id="no weights"),
        pytest.param(lacking("tokenizer.json"), "lacks a tokenizer", id="no tokenizer"),
        pytest.param(lacking("chat_template.jinja"), "no chat template", id="no chat template"),
    ],
)
def test_incomplete_judge_folder_is_refused(good, workshop, tmp_path, damage, said):
    judge = shutil.copytree(workshop / "judge", tmp_path / "judge")
    damage(judge)
    with pytest.raises(UsageError, match=said):
        check_config(good(f"fapo.judge.model={judge}"))


def test_policy_with_its_tokenizer_and_template_elsewhere_passes(good, workshop, tmp_path):
    policy = shutil.copytree(workshop / "policy", tmp_path / "policy")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (policy / name).unlink()
    with pytest.raises(UsageError, match="lacks a tokenizer"):
        check_config(good(f"actor_rollout_ref.model.path={policy}"))
    elsewhere = [f"actor_rollout_ref.model.path={policy}", f"actor_rollout_ref.model.tokenizer_path={workshop}/policy"]
    check_config(good(*elsewhere))
    (tmp_path / "bare").mkdir()
    shutil.copy2(workshop / "policy" / "tokenizer.json", tmp_path / "bare")
    elsewhere[1] = f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'bare'}"
    with pytest.raises(UsageError, match="no chat template"):
        check_config(good(*elsewhere))
    check_config(good(*elsewhere, "actor_rollout_ref.model.custom_chat_template=x"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "7", "{", ""])
def test_model_file_that_is_no_json_object_is_refused(good, workshop, tmp_path, name, text):
    judge = shutil.copytree(workshop / "judge", tmp_path / "judge")
    (judge / "chat_template.jinja").unlink()
    (judge / name).write_text(text)
    with pytest.raises(UsageError):
        check_config(good(f"fapo.judge.model={judge}"))


UNCOUNTED = ("ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null")


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")


def test_on_a_cluster_devices_are_counted_by_ray_and_folders_must_be_absolute(good, cluster, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"ray_kwargs.ray_init.num_cpus=16, but this command joins a Ray cluster"):
        check_config(good())
    with pytest.raises(UsageError, match=r"set ray_kwargs.ray_init.num_gpus=null"):
        check_config(good("ray_kwargs.ray_init.num_cpus=null"))
    with pytest.raises(UsageError, match=r"trainer.default_local_dir='checkpoints.*' is relative"):
        check_config(good(*UNCOUNTED))
    absolute = f"trainer.default_local_dir={tmp_path}"
    with pytest.raises(UsageError, match=r"fapo.run_dir='here' is relative"):
        check_config(good(*UNCOUNTED, absolute, "fapo.run_dir=here"))
    (tmp_path / "t.txt").write_text("{problem}\n{reference}\n{solution}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"fapo.judge.template='t.txt' is relative"):
        check_config(good(*UNCOUNTED, absolute, "fapo.judge.template=t.txt"))
    with pytest.raises(UsageError, match=r"fapo.memory.path='v.sqlite' is relative"):
        check_config(good(*UNCOUNTED, absolute, "fapo.memory.path=v.sqlite"))
    check_config(good(*UNCOUNTED, absolute, f"fapo.judge.template={tmp_path / 't.txt'}"))
    check_config(good(*UNCOUNTED, absolute, "fapo.genrm.replicas=100"))


def test_cluster_started_with_ray_start_is_joined_without_an_address(good, monkeypatch):
    monkeypatch.setattr(checks, "read_ray_address", lambda: "10.0.0.1:6379")
    with pytest.raises(UsageError, match="is relative"):
        check_config(good(*UNCOUNTED))
    check_config(good("+ray_kwargs.ray_init.address=local"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        pytest.param({"prompt": "x", "reward_model": {"ground_truth": "1"}}, "no column 'data_source'", id="source"),
        pytest.param({"prompt": "x", "data_source": "x"}, "no column 'reward_model'", id="reward model"),
        pytest.param(
            {"prompt": "x", "data_source": "x", "reward_model": {"style": "rule"}}, "'ground_truth'", id="ground truth"
        ),
        pytest.param(
            {"prompt": "x", "data_source": "x", "reward_model": {"ground_truth": ["7"]}},
            "expected text or a number",
            id="ground truth is a list",
        ),
        pytest.param(
            {"prompt": "x", "data_source": "x", "reward_model": {"ground_truth": None}},
            "expected text or a number",
            id="ground truth is null",
        ),
    ],
)
def test_parquet_file_without_a_needed_column_is_refused(good, tmp_path, row, said):
    path = tmp_path / "bad.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    with pytest.raises(UsageError, match=said):
        check_config(good(f"data.val_files={path}"))


def test_parquet_file_without_rows_is_refused(good, workshop, tmp_path):
    path = tmp_path / "empty.parquet"
    table = pyarrow.parquet.read_table(workshop / "train.parquet")
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    with pytest.raises(UsageError, match="no rows"):
        check_config(good(f"data.train_files={path}"))


def test_file_that_is_no_parquet_is_refused(good, tmp_path):
    path = tmp_path / "bad.parquet"
    path.write_text("no parquet")
    with pytest.raises(UsageError, match="no readable parquet"):
        check_config(good(f"data.train_files={path}"))


@pytest.mark.parametrize("version", ["0.8.2", "0.10.0", "1.0"])
def test_unsupported_verl_is_refused(version):
    with pytest.raises(SettingsError, match=f"veRL {version} is installed"):
        check_verl_version(version)


def test_mistake_ends_the_command_with_code_2_before_ray_starts(tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=fapo", "+recipe/device=cpu", "fapo.penalti=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 2
    assert "verl_fapo: fapo.penalti=1: unknown setting; did you mean fapo.penalty?" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr and "Started a local Ray instance" not in done.stderr
    assert not (tmp_path / "checkpoints").exists()
