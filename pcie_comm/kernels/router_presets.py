"""Routers of published models, as RouterSpec values, and where their numbers come from.

Sources are the `config.json` files of the models on huggingface.co: `n_routed_experts` (or
`num_experts`, `num_local_experts`), `num_experts_per_tok`, `scoring_func`, `n_group`,
`topk_group`, `norm_topk_prob` and `routed_scaling_factor`. What they do not say is in the models'
code: `e_score_correction_bias` is the bias, 1e-20 stands beside the sum.
"""

from __future__ import annotations

from .router_spec import KIMI_K3, RouterSpec

KIMI_K2 = RouterSpec(num_experts=384, top_k=8, scale=2.827)
"""moonshotai/Kimi-K2-Instruct."""

KIMI_K2_5 = KIMI_K2
"""moonshotai/Kimi-K2.5: `text_config` has the router of Kimi K2."""

KIMI_LINEAR = RouterSpec(num_experts=256, top_k=8, scale=2.446)
"""moonshotai/Kimi-Linear-48B-A3B-Instruct: `num_expert_group` and `topk_group` are 1."""

DEEPSEEK_V3 = RouterSpec(num_experts=256, top_k=8, groups=8, topk_groups=4, scale=2.5)
"""deepseek-ai/DeepSeek-V3, and DeepSeek-R1."""

DEEPSEEK_V4_FLASH = RouterSpec(num_experts=256, top_k=6, score="sqrtsoftplus", scale=1.5)
"""deepseek-ai/DeepSeek-V4-Flash. Its first layers route by a hash of the token instead."""

DEEPSEEK_V4_PRO = RouterSpec(num_experts=384, top_k=6, score="sqrtsoftplus", scale=2.5)
"""deepseek-ai/DeepSeek-V4-Pro; see DEEPSEEK_V4_FLASH."""

GLM_4_5 = RouterSpec(num_experts=160, top_k=8, scale=2.5)
"""zai-org/GLM-4.5."""

GLM_4_5_AIR = RouterSpec(num_experts=128, top_k=8)
"""zai-org/GLM-4.5-Air."""

MINIMAX_M2 = RouterSpec(num_experts=256, top_k=8)
"""MiniMaxAI/MiniMax-M2: `use_routing_bias`, `scoring_func` sigmoid."""

QWEN3_MOE = RouterSpec(num_experts=128, top_k=8, score="softmax", bias=False, eps=0.0)
"""Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B: softmax over all experts, `norm_topk_prob`."""

GPT_OSS_120B = RouterSpec(
    num_experts=128, top_k=4, score="softmax_topk", bias=False, renormalize=False, eps=0.0
)
"""openai/gpt-oss-120b. The bias of its router's linear layer is part of the logits."""

GPT_OSS_20B = RouterSpec(
    num_experts=32, top_k=4, score="softmax_topk", bias=False, renormalize=False, eps=0.0
)
"""openai/gpt-oss-20b; see GPT_OSS_120B."""

PRESETS: dict[str, RouterSpec] = {
    "kimi-k3": KIMI_K3,
    "kimi-k2": KIMI_K2,
    "kimi-k2.5": KIMI_K2_5,
    "kimi-linear": KIMI_LINEAR,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "deepseek-v4-pro": DEEPSEEK_V4_PRO,
    "glm-4.5": GLM_4_5,
    "glm-4.5-air": GLM_4_5_AIR,
    "minimax-m2": MINIMAX_M2,
    "qwen3-moe": QWEN3_MOE,
    "gpt-oss-120b": GPT_OSS_120B,
    "gpt-oss-20b": GPT_OSS_20B,
}
"""Every router above by the name of its model."""
