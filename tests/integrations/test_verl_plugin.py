"""verl's agent loop with Paceline as rollout engine, on a CPU with Ray: tokens are the engine's, and the weights follow."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_policy import write_policy

from paceline import Engine, SamplingParams
from paceline.engine.prompts import derive_seed

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/integrations/verl_agent_loop.py"
ROLLOUT = "actor_rollout_ref.rollout."
NUMBERS = [27, 97, 3, 27]
PROMPT = [2, 7, 11]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two policies of the same shape."""
    return [write_policy(tmp_path_factory.mktemp("policy"), seed) for seed in (0, 1)]


def make_config(folder, *overrides):
    import verl
    from hydra import compose, initialize_config_dir

    own = ["name=paceline", "nnodes=1", "n_gpus_per_node=1", "tensor_model_parallel_size=1", "prompt_length=16",
           "response_length=24", "dtype=float32", "calculate_log_probs=True", "full_determinism=True", "agent.num_workers=1",
           "checkpoint_engine.update_weights_bucket_megabytes=0"]  # every tensor is sent by itself
    settings = ["strategy=suffix:d4w2v8", "engine.kv_tokens=4096"]
    with initialize_config_dir(config_dir=str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={folder}", *(ROLLOUT + one for one in own),
            *(f"+{ROLLOUT}engine_kwargs.paceline.{one}" for one in settings), *overrides])


def rollout_config(folder, *overrides):
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(make_config(folder, *overrides).actor_rollout_ref.rollout)


def expected(folder, prompts, steps, temperature=1.0):
    """What `Engine.generate` gives without speculation for the seeds of verl's deterministic requests."""
    engine = Engine.load(folder, dtype="float32", drafter="none", strategy="off", kv_tokens=4096)
    rollouts = []
    for number, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(temperature=temperature, max_new_tokens=24),
                   seeds=[derive_seed(42, f"{steps}/det-{number}", 0)])
        while not (finished := engine.step().finished):
            pass
        rollouts += finished
    return rollouts


@pytest.fixture
def agent_loop(folders, request):
    """The agent loop's manager, replicas and configuration, with ranks as `request.param` says."""
    import ray
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager
    from verl.workers.rollout.llm_server import LLMServerManager

    config = make_config(folders[0], f"{ROLLOUT}n_gpus_per_node=2",  # without GPUs: the number of replicas times ranks
                         f"{ROLLOUT}tensor_model_parallel_size={request.param}")
    ray.init(address="local", num_cpus=2, include_dashboard=False)  # never joins another cluster
    servers = LLMServerManager.create(config=config)
    yield AgentLoopManager.create(config=config, llm_client=servers.get_client()), servers.get_replicas(), config
    ray.shutdown()


def generate(manager):
    """Token ids, log-probabilities and extra fields of the answers that the agent loop returns."""
    import numpy as np
    from verl import DataProto

    messages = [[{"role": "user", "content": f"{number}:"}] for number in NUMBERS]
    output = manager.generate_sequences(DataProto(non_tensor_batch={"raw_prompt": np.array(messages, dtype=object)}))
    lengths = output.batch["response_mask"].sum(1).tolist()
    tokens = [row[:length].tolist() for row, length in zip(output.batch["responses"], lengths, strict=True)]
    logprobs = [row[:length].tolist() for row, length in zip(output.batch["rollout_log_probs"], lengths, strict=True)]
    return tokens, logprobs, output.non_tensor_batch


def check_answers(manager, folder, steps):
    tokens, logprobs, extra = generate(manager)
    prompts = [[int(digit) for digit in str(number)] + [11] for number in NUMBERS]
    rollouts = expected(folder, prompts, steps)
    assert tokens == [rollout.token_ids for rollout in rollouts]
    for found, rollout in zip(logprobs, rollouts, strict=True):
        assert found == pytest.approx(rollout.logprobs, abs=1e-4)
    for name in ("global_steps", "min_global_steps", "max_global_steps"):
        assert set(extra[name]) == {steps}
    for number, rollout in enumerate(rollouts):
        steps_done, accepted = extra["spec_num_verify_steps"][number], extra["spec_num_accepted_tokens"][number]
        assert steps_done + accepted == len(rollout.token_ids) and accepted <= extra["spec_num_draft_tokens"][number]
        assert extra["accept_length"][number] == pytest.approx(1 + accepted / steps_done)
    return tokens


def num_tokens(replica):
    """Number of tokens that a replica has generated."""
    import ray

    return ray.get(replica.servers[0].__ray_call__.remote(lambda server: server._thread.stats.generated_tokens))


@pytest.mark.parametrize("agent_loop", [1], indirect=True)
def test_the_agent_loop_generates_and_follows_the_weights(agent_loop, folders, monkeypatch):
    from transformers import AutoModelForCausalLM
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics
    from verl.workers.rollout.base import get_rollout_class

    """Two replicas: which one answers a request changes no token, and each gets the weights."""
    manager, replicas, config = agent_loop
    before = check_answers(manager, folders[0], None)
    assert len(replicas) == 2 and all(num_tokens(replica) > 0 for replica in replicas), "both have generated"
    monkeypatch.setenv("RANK", "0")
    config = config.actor_rollout_ref
    adapter = get_rollout_class("paceline")(config.rollout, config.model, None)
    assert adapter.replica_rank == 0 and adapter.is_leader_rank
    adapters = [adapter, get_rollout_class("paceline")(config.rollout, config.model, None, replica_rank=1)]
    weights = dict(AutoModelForCausalLM.from_pretrained(folders[1]).named_parameters())
    for each in adapters:
        with pytest.raises(ValueError, match="missing"):
            asyncio.run(each.update_weights(iter(list(weights.items())[:-1]), global_steps=4))
    assert check_answers(manager, folders[0], None) == before  # refused as a whole
    for each in adapters:
        asyncio.run(each.update_weights(iter(weights.items()), global_steps=5))
    assert check_answers(manager, folders[1], 5) != before
    for each, replica in zip(adapters, replicas, strict=True):
        asyncio.run(each.release())  # a server with a device of its own does not sleep
        asyncio.run(replica.abort_all_requests())
        asyncio.run(replica.release_kv_cache())
        asyncio.run(replica.resume_kv_cache())
        asyncio.run(replica.resume_generation())
    check_answers(manager, folders[1], 5)
    extra = generate(manager)[2]
    metrics = compute_spec_decode_metrics(extra["spec_num_draft_tokens"], extra["spec_num_accepted_tokens"],
                                          extra["spec_num_verify_steps"])
    assert metrics["rollout/spec_accept_length"] == pytest.approx(sum(extra["accept_length"]) / len(NUMBERS))
    with pytest.raises(ValueError, match="merge"):
        asyncio.run(adapter.update_weights(iter(weights.items()), peft_config={"r": 8}))
    with pytest.raises(ValueError, match="delta_flush"):
        asyncio.run(adapter.update_weights(iter(()), wire_format="delta_flush"))


@pytest.mark.parametrize("agent_loop", [2], indirect=True)
def test_a_replica_of_two_ranks(agent_loop, folders, monkeypatch):
    """The policy is split over two processes. Of the trainer's processes whose GPUs they have, the first sends the weights."""
    from transformers import AutoModelForCausalLM
    from verl.workers.rollout.base import get_rollout_class

    manager, replicas, config = agent_loop
    assert len(replicas) == 1
    before = check_answers(manager, folders[0], None)
    weights = dict(AutoModelForCausalLM.from_pretrained(folders[1]).named_parameters())
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        adapter = get_rollout_class("paceline")(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, None)
        assert adapter.replica_rank == 0 and adapter.is_leader_rank == (rank == 0)
        left = iter(weights.items())
        asyncio.run(adapter.update_weights(left, global_steps=5))
        assert next(left, None) is None, "it has taken part in gathering the weights"
        asyncio.run(adapter.release())
    assert check_answers(manager, folders[1], 5) != before


def test_the_example(folders):
    """In a process of its own, because it starts Ray by itself."""
    found = subprocess.run([sys.executable, str(EXAMPLE), str(folders[0]), ROLLOUT + "dtype=float32"], capture_output=True,
                           text=True, check=True, timeout=300)
    lines = [line for line in found.stdout.splitlines() if "accept length" in line]
    assert [line.split("global step ")[1].split(",")[0] for line in lines] == ["None"] * 3 + ["1"] * 3


def make_server(folder, mode="HYBRID", *overrides):
    from omegaconf import OmegaConf
    from verl.workers.rollout.replica import RolloutMode

    from paceline.integrations.verl.server import PacelineServer

    return PacelineServer(rollout_config(folder, *overrides), OmegaConf.create({"path": str(folder)}), RolloutMode[mode])


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_wait_while_the_server_sleeps(folders, ranks):
    async def run():
        server = make_server(folders[0], "HYBRID", f"{ROLLOUT}tensor_model_parallel_size={ranks}")
        await server.ready()
        await server.sleep()
        task = asyncio.create_task(server.generate(PROMPT, {"logprobs": False}, "det-0"))
        await asyncio.sleep(0.1)
        await server.wake_up(tags=["weights"])
        await server.receive_weights((folders[1] / "model.safetensors").read_bytes())
        await server.update_weights(3)
        await asyncio.sleep(0.1)
        assert not task.done()
        await server.wake_up(tags=["kv_cache"])
        output = await task
        await server.close()
        return output

    output = asyncio.run(run())
    assert output.token_ids == expected(folders[1], [PROMPT], None)[0].token_ids and output.log_probs is None
    assert output.stop_reason == "completed" and output.extra_fields["max_global_steps"] == 3


@pytest.mark.parametrize(("draft_vocab", "ranks"), [(0, 1), (8, 1), (0, 2)])
def test_the_drafter_is_trained_between_steps(folders, tmp_path, draft_vocab, ranks):
    """Answers are the engine's whatever the drafter has learned. A new server continues its checkpoint."""
    from paceline.spot import load_snapshot

    prompts = [[number % 10, 11] for number in range(12)]
    own = {"drafter": "learned", "strategy": "eagle:d3w2v6", "drafter_folder": tmp_path, "spot": f"{{draft_vocab:{draft_vocab}}}",
           "drafter_budget": "{shortest_s:1.0,warm_up_s:0,trial_share:100.0,longest_s:1.0}"}
    overrides = [f"{'' if key == 'strategy' else '+'}{ROLLOUT}engine_kwargs.paceline.{key}={value}" for key, value in own.items()]

    overrides.append(f"{ROLLOUT}tensor_model_parallel_size={ranks}")

    async def step(server):
        outputs = await asyncio.gather(*(server.generate(prompt, {}, f"det-{number}") for number, prompt in enumerate(prompts)))
        await server.sleep()
        metrics = await server.drafter_metrics()
        await server.wake_up()
        return [output.token_ids for output in outputs], metrics

    async def run():
        server = make_server(folders[0], "HYBRID", *overrides)
        await server.ready()
        first, metrics = await step(server)
        second, _ = await step(server)
        await server.close()
        continued = make_server(folders[0], "HYBRID", *overrides)
        again, later = await step(continued)
        assert later["drafter/steps"] > metrics["drafter/steps"] >= 1 and first == second == again
        await continued.close()
        return first

    assert asyncio.run(run()) == [one.token_ids for one in expected(folders[0], prompts, None)]
    assert load_snapshot(tmp_path / "server") is not None


def test_aborted_requests_and_closed_servers(folders):
    async def run():
        server = make_server(folders[0], "HYBRID", ROLLOUT + "response_length=4000", ROLLOUT + "max_model_len=4000")
        await server.ready()
        long = asyncio.create_task(server.generate(PROMPT, {"ignore_eos": True, "max_tokens": 200, "logprobs": True}, "long"))
        await asyncio.sleep(0)  # it has been sent
        report = await server.abort_all_requests()
        parked = asyncio.create_task(server.generate(PROMPT, {"max_tokens": 24}, "det-0"))
        await asyncio.sleep(0.1)
        assert not parked.done()
        await server.resume_generation()
        late = await parked
        await server.abort_all_requests(reject_request=True)
        rejected = await server.generate(PROMPT, {}, "late")
        assert not (await server.abort_request("late"))["aborted"]
        return await long, report, late, rejected

    long, report, late, rejected = asyncio.run(run())
    assert report == {"aborted_count": 1, "request_ids": ["long"]} and long.stop_reason == "aborted"
    assert len(long.token_ids) == len(long.log_probs) < 200
    assert late.token_ids == expected(folders[0], [PROMPT], None)[0].token_ids
    assert rejected.stop_reason == "aborted" and rejected.token_ids == []


def test_sampling_parameters(folders):
    from paceline.integrations.verl.settings import sampling_params

    config = rollout_config(folders[0])
    params = sampling_params({"temperature": 0.7, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": True,
                              "stop": "1", "seed": 3, "min_p": None, "n": 1}, config, 20, "key")
    assert params == SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=20, stop=("1",), seed=3, repetition_penalty=1.2)
    assert sampling_params({}, config, 4, "a").seed != sampling_params({}, config, 4, "b").seed
    assert sampling_params({}, config, 4, "a").max_new_tokens == 24
    for wrong in ({"n": 2}, {"best_of": 2}, {"top_p": 3.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sampling_params(wrong, config, 4, "key")


def test_what_is_not_supported_is_refused(folders):
    from verl.workers.rollout.replica import get_rollout_replica_class

    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size: 2"):
        get_rollout_replica_class("paceline")(0, rollout_config(folders[0], ROLLOUT + "pipeline_model_parallel_size=2"), None, 2)
    with pytest.raises(ValueError, match="draftr"):
        make_server(folders[0], "HYBRID", f"+{ROLLOUT}engine_kwargs.paceline.draftr=suffix")
    with pytest.raises(ValueError, match="images"):
        asyncio.run(make_server(folders[0]).generate(PROMPT, {}, "one", image_data=[1]))


def test_verl_finds_the_engine_by_a_variable():
    """Where plug-ins are switched off. In the other tests verl finds it by itself."""
    code = ("import verl; from verl.workers.rollout.replica import RolloutReplicaRegistry as registry; "
            "print(registry.get('paceline').__name__)")
    variables = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "paceline.integrations.verl"}
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True,
                           check=True, timeout=240)
    assert found.stdout.split() == ["PacelineReplica"]


def test_a_whole_training_run(folders, tmp_path):
    """Three GRPO steps of verl's own trainer with FSDP2: the servers sleep while it trains, and get its weights."""
    import pandas

    rows = [{"data_source": "twos", "prompt": [{"role": "user", "content": f"{number}:"}], "extra_info": {"index": number},
             "reward_model": {"style": "rule", "ground_truth": ""}} for number in range(3, 35)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "data.parquet")
    here, actor = Path(__file__).parent, "actor_rollout_ref.actor."
    settings = {
        "data": {"train_files": tmp_path / "data.parquet", "val_files": tmp_path / "data.parquet", "train_batch_size": 8,
                 "max_prompt_length": 16, "max_response_length": 24, "dataloader_num_workers": 0},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref.model": {"path": folders[0], "use_remove_padding": False},
        "+actor_rollout_ref.model.override_config": {"attn_implementation": "sdpa"},
        actor[:-1]: {"strategy": "fsdp2", "optim.lr": 0.003, "ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8,
                     "use_torch_compile": False, "fsdp_config.use_torch_compile": False},
        "+" + actor + "fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ROLLOUT[:-1]: {"name": "paceline", "tensor_model_parallel_size": 1, "n": 4, "dtype": "float32",
                       "calculate_log_probs": True, "log_prob_micro_batch_size_per_gpu": 8, "agent.num_workers": 1},
        f"+{ROLLOUT}engine_kwargs.paceline": {"device": "cpu", "engine.kv_tokens": 8192},
        "reward": {"custom_reward_function.path": here / "verl_reward.py", "num_workers": 1},
        "trainer": {"device": "cpu", "n_gpus_per_node": 1, "total_training_steps": 3, "val_before_train": False,
                    "logger": "[console]", "default_local_dir": tmp_path / "checkpoints"},
        "transfer_queue.backend.SimpleStorage": {"num_data_storage_units": 1},
        "ray_kwargs.ray_init": {"num_cpus": 24}, "+ray_kwargs.ray_init": {"num_gpus": 1, "include_dashboard": False},
    }
    overrides = [f"{table}.{key}={value}" for table, values in settings.items() for key, value in values.items()]
    variables = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",
                 "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], env={**os.environ, **variables},
                          cwd=tmp_path, capture_output=True, text=True, timeout=500)
    steps = re.findall(r"step:\d+ - (.*)", done.stdout)
    assert done.returncode == 0 and len(steps) == 3, done.stdout[-4000:] + done.stderr[-4000:]
    for line in steps:
        metrics = dict(pair.split(":", 1) for pair in line.split(" - "))
        assert float(metrics["training/rollout_actor_probs_pearson_corr"]) > 0.995  # verl sends weights rounded to bfloat16
        assert float(metrics["actor/grad_norm"]) > 0
        assert "(0)" in metrics["training/off_policy/trajectory_staleness/max"]  # the global step came back
