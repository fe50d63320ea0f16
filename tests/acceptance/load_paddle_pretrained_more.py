"""The same as load_paddle_pretrained.py; gpt-oss runs its experts as in training.

Of PaddleFormers 1.2.0's two ways through gpt-oss' experts the one of `eval()` gives a token the weights of others
(`routing_weights.transpose([0, 1])` turns nothing), so that its logits are no model's; the one of training is right.
"""

from __future__ import annotations

import sys
from typing import Any

import load_paddle_pretrained as plain


def as_in_training(forward: Any) -> Any:
    def run(self: Any, *args: Any, **more: Any) -> Any:
        self.training = True
        return forward(self, *args, **more)

    return run


if __name__ == "__main__":
    if sys.argv[2].startswith("GptOss"):
        from paddleformers.transformers.gpt_oss import modeling

        modeling.GptOssExperts.forward = as_in_training(modeling.GptOssExperts.forward)
    plain.main(*sys.argv[1:])
