# SPDX-License-Identifier: Apache-2.0
"""Who to cite for what a run did: papers by algorithm, by loss, and by option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jrl.learners.config import MethodConfig
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.rft import RFTConfig


class Paper(NamedTuple):
    """A work that is cited.

    Attributes:
      key: Of its BibTeX entry.
      authors: As BibTeX has them; after the first few, "others".
      title: With braces where capitals must stay.
      year: Of its first publication.
      arxiv: Its number there; empty: `note` says where it is.
      note: Journal or address of what is not on arXiv.
    """

    key: str
    authors: str
    title: str
    year: int
    arxiv: str = ""
    note: str = ""

    def bibtex(self) -> str:
        """The entry."""
        where = (
            f"journal = {{arXiv preprint arXiv:{self.arxiv}}}" if self.arxiv else f"note = {{{self.note}}}"
        )
        kind = "article" if self.arxiv else "misc"
        return (
            f"@{kind}{{{self.key},\n  title = {{{self.title}}},\n  author = {{{self.authors}}},\n"
            f"  year = {{{self.year}}},\n  {where},\n}}"
        )


LORA = Paper(
    "hu2021lora",
    "Hu, Edward J. and Shen, Yelong and Wallis, Phillip and others",
    "{LoRA}: Low-Rank Adaptation of Large Language Models",
    2021,
    "2106.09685",
)
_DPO = Paper(
    "rafailov2023direct",
    "Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and others",
    "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    2023,
    "2305.18290",
)
_METHODS: Mapping[type[MethodConfig], tuple[Paper, ...]] = {
    PPOConfig: (
        Paper(
            "schulman2017proximal",
            "Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg",
            "Proximal Policy Optimization Algorithms",
            2017,
            "1707.06347",
        ),
        Paper(
            "ziegler2019fine",
            "Ziegler, Daniel M. and Stiennon, Nisan and Wu, Jeffrey and others",
            "Fine-Tuning Language Models from Human Preferences",
            2019,
            "1909.08593",
        ),
    ),
    ILQLConfig: (
        Paper(
            "snell2022offline",
            "Snell, Charlie and Kostrikov, Ilya and Su, Yi and Yang, Mengjiao and Levine, Sergey",
            "Offline {RL} for Natural Language Generation with Implicit Language {Q} Learning",
            2022,
            "2206.11871",
        ),
    ),
    RFTConfig: (
        Paper(
            "gulcehre2023reinforced",
            "Gulcehre, Caglar and Le Paine, Tom and Srinivasan, Srivatsan and others",
            "Reinforced Self-Training ({ReST}) for Language Modeling",
            2023,
            "2308.08998",
        ),
    ),
    DPOConfig: (_DPO,),
    DDPOConfig: (
        Paper(
            "black2023training",
            "Black, Kevin and Janner, Michael and Du, Yilun and Kostrikov, Ilya and Levine, Sergey",
            "Training Diffusion Models with Reinforcement Learning",
            2023,
            "2305.13301",
        ),
    ),
    RewardConfig: (
        Paper(
            "ouyang2022training",
            "Ouyang, Long and Wu, Jeff and Jiang, Xu and others",
            "Training language models to follow instructions with human feedback",
            2022,
            "2203.02155",
        ),
        Paper(
            "bradley1952rank",
            "Bradley, Ralph Allan and Terry, Milton E.",
            "Rank Analysis of Incomplete Block Designs: {I}. The Method of Paired Comparisons",
            1952,
            note="Biometrika 39(3/4), 324--345",
        ),
    ),
}
_AOT = Paper(
    "melnyk2024distributional",
    "Melnyk, Igor and Mroueh, Youssef and Belgodere, Brian and others",
    "Distributional Preference Alignment of {LLMs} via Optimal Transport",
    2024,
    "2406.05882",
)
_APO = Paper(
    "doosterlinck2024anchored",
    "D'Oosterlinck, Karel and Xu, Winnie and Develder, Chris and others",
    "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    2024,
    "2408.06266",
)
_DPO_LOSSES: Mapping[str, Paper] = {
    "hinge": Paper(
        "zhao2023slic",
        "Zhao, Yao and Joshi, Rishabh and Liu, Tianqi and others",
        "{SLiC-HF}: Sequence Likelihood Calibration with Human Feedback",
        2023,
        "2305.10425",
    ),
    "ipo": Paper(
        "azar2023general",
        "Azar, Mohammad Gheshlaghi and Rowland, Mark and Piot, Bilal and others",
        "A General Theoretical Paradigm to Understand Learning from Human Preferences",
        2023,
        "2310.12036",
    ),
    "kto_pair": Paper(
        "ethayarajh2024kto",
        "Ethayarajh, Kawin and Xu, Winnie and Muennighoff, Niklas and Jurafsky, Dan and Kiela, Douwe",
        "{KTO}: Model Alignment as Prospect Theoretic Optimization",
        2024,
        "2402.01306",
    ),
    "exo_pair": Paper(
        "ji2024towards",
        "Ji, Haozhe and Lu, Cheng and Niu, Yilin and others",
        "Towards Efficient Exact Optimization of Language Model Alignment",
        2024,
        "2402.00856",
    ),
    "nca_pair": Paper(
        "chen2024noise",
        "Chen, Huayu and He, Guande and Yuan, Lifan and others",
        "Noise Contrastive Alignment of Language Models with Explicit Rewards",
        2024,
        "2402.05369",
    ),
    "robust": Paper(
        "chowdhury2024provably",
        "Ray Chowdhury, Sayak and Kini, Anush and Natarajan, Nagarajan",
        "Provably Robust {DPO}: Aligning Language Models with Noisy Feedback",
        2024,
        "2403.00409",
    ),
    "bco_pair": Paper(
        "jung2024binary",
        "Jung, Seungjae and Han, Gunsoo and Nam, Daniel Wontae and On, Kyoung-Woon",
        "Binary Classifier Optimization for Large Language Model Alignment",
        2024,
        "2404.04656",
    ),
    "sppo_hard": Paper(
        "wu2024self",
        "Wu, Yue and Sun, Zhiqing and Yuan, Huizhuo and others",
        "Self-Play Preference Optimization for Language Model Alignment",
        2024,
        "2405.00675",
    ),
    "aot": _AOT,
    "aot_unpaired": _AOT,
    "apo_zero": _APO,
    "apo_down": _APO,
    "discopop": Paper(
        "lu2024discovering",
        "Lu, Chris and Holt, Samuel and Fanconi, Claudio and others",
        "Discovering Preference Optimization Algorithms with and for Large Language Models",
        2024,
        "2406.08414",
    ),
    "sigmoid_norm": Paper(
        "meng2024simpo",
        "Meng, Yu and Xia, Mengzhou and Chen, Danqi",
        "{SimPO}: Simple Preference Optimization with a Reference-Free Reward",
        2024,
        "2405.14734",
    ),
}
_CDPO = Paper(
    "mitchell2023note",
    "Mitchell, Eric",
    "A note on {DPO} with noisy preferences and relationship to {IPO}",
    2023,
    note="https://ericmitchell.ai/cdpo.pdf",
)
_F_DPO = Paper(
    "wang2023beyond",
    "Wang, Chaoqi and Jiang, Yibo and Yang, Chenghao and Liu, Han and Chen, Yuxin",
    "Beyond Reverse {KL}: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
    2023,
    "2309.16240",
)
_LD_DPO = Paper(
    "liu2024length",
    "Liu, Wei and Bai, Yang and Han, Chengcheng and others",
    "Length Desensitization in Direct Preference Optimization",
    2024,
    "2409.06411",
)
_WPO = Paper(
    "zhou2024wpo",
    "Zhou, Wenxuan and Agrawal, Ravi and Zhang, Shujian and others",
    "{WPO}: Enhancing {RLHF} with Weighted Preference Optimization",
    2024,
    "2406.11827",
)
_TR_DPO = Paper(
    "gorbatovski2024learn",
    "Gorbatovski, Alexey and Shaposhnikov, Boris and Malakhov, Alexey and others",
    "Learn Your Reference Model for Real Good Alignment",
    2024,
    "2404.09656",
)


def citations(method: MethodConfig) -> list[Paper]:
    """What to cite for a method as it is configured; a method of a user's own has nothing, and neither has SFT."""
    found = [paper for known, papers in _METHODS.items() if isinstance(method, known) for paper in papers]
    if isinstance(method, DPOConfig):
        found += [_DPO_LOSSES[name] for name in method.loss_type if name in _DPO_LOSSES]
        options = (
            (method.label_smoothing > 0 and "sigmoid" in method.loss_type, _CDPO),
            (method.f_divergence_type != "reverse_kl", _F_DPO),
            (method.ld_alpha is not None, _LD_DPO),
            (method.use_weighting, _WPO),
            (method.sync_ref_model, _TR_DPO),
        )
        found += [paper for applies, paper in options if applies]
    return list(dict.fromkeys(found))
