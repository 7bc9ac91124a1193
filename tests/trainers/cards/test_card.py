# SPDX-License-Identifier: Apache-2.0
"""The card beside every saved model: what it says, what it must not say, and that it never stands in a save's way."""

import re

import pytest
import yaml
from transformers import GPT2Config

import jrl
from jrl.learners.config import MethodConfig
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.reward_model_config import RewardConfig
from jrl.losses.dpo import LOSSES
from jrl.trainers.cards import card as card_module
from jrl.trainers.cards import run_plot
from jrl.trainers.cards.card import ModelCard, method_names
from jrl.trainers.cards.citations import bibliography, citations
from jrl.trainers.cards.run_plot import plot_run
from jrl.trainers.checkpoints.checkpointer import MODEL
from tests.trainers.runs import save_tiny_checkpoint, sft_config

HISTORY = [
    {"step": 0, "evaluation": 0, "reward/mean": 0.1},
    *(
        {"step": i, "iteration": i, "reward/mean": i / 10, "kl/per_sequence": i / 5, "time/x": 1.0}
        for i in range(1, 6)
    ),
    {"step": 5, "evaluation": 1, "reward/mean": 0.7},
]


def card(method="ppo", history=HISTORY, base=("gpt2", True), datasets=(), **sections):
    config = getattr(jrl, f"default_{method}_config")().evolve(**sections)
    return ModelCard(
        config=config,
        base=base,
        is_adapter=False,
        library="transformers",
        datasets=datasets,
        data={"prompts": "6"},
        sha256={"prompts": "ab" * 32},
        description={"parameters": "1 train"},
        history=history,
        papers=citations(config.method),
    )


def head_of(text):
    return yaml.safe_load(re.fullmatch(r"---\n(.*?)---\n.*", text, re.DOTALL)[1])


class TestText:
    def test_the_head_is_what_the_hub_reads(self):
        found = head_of(card(datasets=("stanfordnlp/imdb", "pairs.jsonl")).text())
        assert found == {
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "base_model": "gpt2",
            "datasets": ["stanfordnlp/imdb"],
            "tags": ["jrl", "ppo", "reinforcement-learning"],
        }

    def test_the_hub_library_reads_the_same(self):
        hub = pytest.importorskip("huggingface_hub")
        text = card(datasets=("stanfordnlp/imdb",)).text()
        found = hub.ModelCard(text)
        assert found.data.to_dict() == head_of(text)
        assert found.data.base_model == "gpt2" and found.text.lstrip().startswith("# ")

    def test_a_base_of_no_name_is_not_claimed_to_be_on_the_hub(self):
        text = card(base=("first", False)).text()
        assert "base_model" not in head_of(text) and "Started from `first`" in text
        assert card_module._base_name(GPT2Config()) == ("a fresh gpt2", False)

    def test_it_says_what_was_done_and_with_what_result(self):
        text = card().text(name="A name", plot="training.png")
        assert (
            "# A name\n" in text
            and "proximal policy optimisation (PPO)" in text
            and "5 optimizer steps" in text
        )
        assert "![Curves of the run](training.png)" in text
        assert "| `reward/mean` | 0.5 | 0.7 |" in text and "time/x" not in text
        assert "- prompts: 6" in text and "`abababababababab`" in text
        assert "arXiv:1707.06347" in text and f"- jax: {card_module.version('jax')}" in text
        assert "](training.png)" not in card().text()

    def test_metrics_stand_side_by_side(self):
        history = [{"step": 3, "iteration": 3, "sft/loss": 2.0, "sft/tokens": 9.0}]
        assert (
            "| metric | training, step 3 |\n| --- | --- |\n| `sft/loss` | 2 |\n"
            in card(history=history).text()
        )
        history.append({"step": 3, "evaluation": 0, "eval/sft/loss": 1.5})
        text = card(history=history).text()
        assert "| metric | training, step 3 | evaluation, step 3 |" in text
        assert "| `sft/loss` | 2 | 1.5 |\n| `sft/tokens` | 9 |  |" in text

    def test_the_reward_stands_first_with_its_error(self):
        facts = {"reward/standard_error": 0.03, "sampling/num_prompts": 64, "sampling/samples_per_prompt": 1}
        history = [
            {"step": 3, "iteration": 3, "completion/length_mean": 9.0, "reward/std": 1.0, "reward/mean": 0.5},
            {"step": 3, "evaluation": 1, "metrics/a": 1.0, "reward/mean": 0.7, **facts},
        ]
        assert (
            "| `reward/mean` | 0.5 | 0.7 +- 0.03 (64 prompts) |\n| `reward/std` | 1 |  |\n| `metrics/a` |  | 1 |\n"
            "| `completion/length_mean` | 9 |  |" in card(history=history).text()
        )

    def test_what_was_set_stands_before_what_was_not(self):
        text = card(method="ppo", train={"max_grad_norm": 0.5}).text()
        shown, folded = text.split("<details>")
        assert "| `train.max_grad_norm` | `0.5` |" in shown and "cliprange_value" not in shown
        assert "cliprange_value: 0.2" in folded

    def test_no_folder_of_the_machine_is_named(self):
        text = card(
            datasets=(".../pairs.jsonl",),
            train={"checkpoint_dir": "/home/someone/runs/x", "rollout_logging_dir": "/home/someone/y"},
            tokenizer={"tokenizer_path": "/home/someone/tok"},
            model={"model_path": "/home/someone/m"},
        ).text()
        assert "/home/someone" not in text and "`.../x`" in text

    def test_names_do_not_break_out(self):
        evil = "x`](javascript:alert(1)) <script>y</script> | z\n---\n# own\n```\n</details>\x1b[2J"
        text = card(
            base=(evil, False),
            datasets=(evil,),
            history=[{"step": 1, "iteration": 1, evil: 1.0}],
            train={"run_name": evil, "tags": [evil]},
        ).text(name=evil)
        head_of(text)
        assert text.count("\n---\n") == 1, "the head's own"
        assert "\x1b" not in text and "\n# own" not in text
        shown, folded = text.split("<details>")
        unquoted = re.sub(r"(`+) ?(?!`).*?(?<!`)\1(?!`)", "", shown)
        assert "<script>" not in unquoted and not re.search(r"(?<!\\)\]\(javascript", unquoted)
        (fence,) = set(re.findall(r"^(`{3,})(?:yaml)?$", folded.partition("## Versions")[0], re.MULTILINE))
        assert len(fence) > 3 and f"{fence}\n\n</details>" in folded
        for line in shown.split("\n"):
            if line.startswith("| `"):
                assert len(re.findall(r"(?<!\\)\|", line)) == 3, line

    def test_a_run_without_records(self):
        assert "None yet." in card(history=[]).text()


class TestPlot:
    def test_curves_of_what_there_is(self, tmp_path):
        assert plot_run(HISTORY, tmp_path / "p.png")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        labels = [label for label, *_ in run_plot._panels(HISTORY[1:-1], [HISTORY[0], HISTORY[-1]])]
        assert labels == ["reward", "KL per sequence (nats)"]

    def test_losses_and_held_out_ones(self):
        training = [{"step": i, "iteration": i, "dpo/loss": 0.7 - i / 10} for i in (1, 2, 3)]
        ((label, drawn, dots),) = run_plot._panels(
            training, [{"step": 2, "evaluation": 0, "eval/dpo/loss": 0.4}]
        )
        assert (
            label == "loss"
            and drawn == ([1.0, 2.0, 3.0], pytest.approx([0.6, 0.5, 0.4]))
            and dots == ([2.0], [0.4])
        )

    def test_numbers_that_are_none_are_left_out(self):
        records = [{"step": i, "reward/mean": value} for i, value in enumerate([1.0, float("nan"), 3.0])]
        assert run_plot._series(records, ("reward/mean",)) == ([0.0, 2.0], [1.0, 3.0])

    def test_a_long_run_is_thinned_out_and_keeps_its_end(self):
        steps, values = run_plot._series([{"step": i, "x": float(i)} for i in range(10_001)], ("x",))
        assert len(steps) <= 400 and steps[-1] == values[-1] == 10_000

    def test_two_points_are_no_curve(self, tmp_path):
        assert not plot_run(HISTORY[:3], tmp_path / "p.png") and not (tmp_path / "p.png").exists()

    def test_a_picture_that_fails_leaves_the_card(self, tmp_path, monkeypatch):
        def broken(*_):
            raise RuntimeError("no fonts")

        monkeypatch.setattr(card_module, "plot_run", broken)
        card().write(tmp_path)
        assert "training.png" not in (tmp_path / "README.md").read_text()


class TestCitations:
    def test_every_method_but_sft_has_one(self):
        for method in (jrl.PPOConfig(), jrl.ILQLConfig(), jrl.RFTConfig(), DPOConfig(), RewardConfig()):
            assert citations(method) and method_names(method)[1], method.name
        assert citations(jrl.SFTConfig()) == []

    @pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"sigmoid", "sft"}))
    def test_every_loss_of_dpo_adds_its_own(self, loss):
        papers = citations(DPOConfig(loss_type=[loss], label_smoothing=0.1 if loss == "exo_pair" else 0.0))
        assert len(papers) == 2 and "arXiv:2305.18290" in papers[0]

    def test_options_of_dpo_add_theirs(self):
        options = dict(label_smoothing=0.1, f_divergence_type="forward_kl", ld_alpha=0.5, use_weighting=True)
        assert len(citations(DPOConfig(**options, sync_ref_model=True))) == 6

    def test_entries_are_whole(self):
        for entry in bibliography().values():
            assert entry.count("{") == entry.count("}") and re.match(r"@(article|misc)\{\w+\d{4}\w+,", entry)

    def test_a_method_of_a_users_own(self):
        assert citations(MethodConfig(name="Mine")) == []
        assert method_names(MethodConfig(name="Mine")) == ("Method", ())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    checkpoint = save_tiny_checkpoint(folder / "tiny")
    config = sft_config(checkpoint, folder / "run", train={"total_steps": 4})
    return jrl.train(samples=["the cat sat", "a dog ran", "we go", "so it is"], config=config)


class TestBesideModels:
    def test_in_every_checkpoint(self, trained):
        folder = trained.run_dir / "checkpoint_4" / MODEL
        text = (folder / "README.md").read_text()
        assert "4 optimizer steps" in text and "- samples: 4" in text and (folder / "training.png").exists()
        assert str(trained.run_dir.parent) not in text

    def test_beside_what_is_saved_by_hand(self, trained, tmp_path):
        trained.dataset_names = ("someone/texts",)
        trained.save_pretrained(tmp_path / "m")
        assert head_of((tmp_path / "m" / "README.md").read_text())["datasets"] == ["someone/texts"]

    def test_of_a_trainer_without_data(self, trained, tmp_path):
        fresh = jrl.SFTTrainer(trained.config.evolve(train={"checkpoint_dir": str(tmp_path)}))
        fresh.save_pretrained(tmp_path / "m")
        assert "0 optimizer steps" in (tmp_path / "m" / "README.md").read_text()
