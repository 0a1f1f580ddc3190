"""What torch's own CUDA code may do to a model's numbers and times."""

import torch


def settle_cuda() -> None:
    """Set what a CUDA model wants of torch, for this process, whatever was set before."""
    # On sm_90 torch prefers cuDNN's attention, which makes a plan for every length that it meets.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Half types are summed in float32, and float32 is multiplied as it is: NVIDIA's containers set
    # an environment variable that would cut its factors down to ten bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
