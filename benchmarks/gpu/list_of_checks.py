"""The checks, in the order in which they run."""

from __future__ import annotations

from benchmarks.gpu import numbers, ranks, unchanged, waits_and_memory
from benchmarks.gpu.check import Check

DEVICES = "tests/measure/test_devices.py::"
LATE = "tests/engine/test_late_copies.py::"
INTERVENTIONS = "tests/interventions/test_launches_of_interventions.py::"

CHECKS = (
    Check(
        1, "fused SGD with momentum and SkipNonFinite, NaN at step 0", unchanged.skips_the_first_step, on_cpu=True
    ),
    Check(
        2, "no synchronization: ordinary steps with Clip and a frozen layer",
        waits_and_memory.no_synchronization_with_clip,
        tests=(
            INTERVENTIONS + "test_a_parameter_without_a_gradient_needs_no_copy_to_the_device",
            DEVICES + "test_a_factor_that_the_host_knows_does_not_make_it_wait",
        ),
    ),
    Check(
        3, "no synchronization: without interventions, sampled steps too",
        waits_and_memory.no_synchronization_with_samples,
        tests=(
            DEVICES + "test_another_device_is_not_waited_for",
            DEVICES + "test_only_one_file_copies_without_waiting",
        ),
    ),
    Check(4, "every statistic as on the CPU, within 1e-4", numbers.statistics_as_on_the_cpu),
    Check(
        5, "NaN at step 30 while the device is 5 ms behind", numbers.nan_while_the_device_is_behind, on_cpu=True
    ),
    Check(
        6, "memory: sampled, tapped, AdaptiveClip, under 64 MiB more", waits_and_memory.memory,
        tests=(DEVICES + "test_a_norm_in_float64_copies_no_large_tensor",),
    ),
    Check(
        7, "a model that is partly on the CPU", numbers.partly_on_the_cpu,
        tests=(DEVICES + "test_the_host_waits_for_what_it_may_read_at_once",),
    ),
    Check(8, "fp16 with a loss scaler, fused and not, overflows forced", numbers.loss_scale, on_cpu=True),
    Check(9, "bf16-mixed and bf16-true", numbers.bfloat16, on_cpu=True),
    Check(
        10, "launches of an ordinary step", waits_and_memory.launches,
        tests=("tests/measure/test_launches.py",),
    ),
    Check(11, "`overhead` within a factor of 2 of event timing", waits_and_memory.overhead_as_measured),
    Check(
        12, "`torch.compile(mode=\"reduce-overhead\")`, accumulation 1 and 4", unchanged.reduce_overhead,
        tests=(LATE + "test_a_loss_that_is_written_over",),
    ),
    Check(13, "10,000 copies to the host under load", numbers.copies_under_load, on_cpu=True),
    Check(
        14, "a stream that is not the default", numbers.another_stream,
        tests=(
            DEVICES + "test_a_stream_waits_for_the_one_that_wrote",
            DEVICES + "test_what_is_made_at_the_start_is_there_for_every_stream",
        ),
    ),
    Check(
        15, "a whole step in `torch.cuda.graph`", unchanged.captured_step,
        tests=(
            LATE + "test_no_event_is_asked_during_a_capture",
            DEVICES + "test_nothing_is_done_in_hooks_while_a_graph_is_captured",
        ),
    ),
    Check(
        16, "two devices in one model: every intervention", ranks.every_intervention, devices=2,
        tests=(
            DEVICES + "test_a_loss_scale_on_another_device_than_the_numbers",
            DEVICES + "test_a_decision_on_another_device_than_running_statistics",
            DEVICES + "test_a_hook_on_a_gradient_on_another_device_than_the_numbers",
            DEVICES + "test_device_threads_begin_a_backward_pass_once",
        ),
    ),
    Check(17, "DDP on two devices, NaN on rank 1", ranks.ddp, devices=2, on_cpu=True, slow=True),
    Check(18, "FSDP2 on two devices, with CPU offload too", ranks.fsdp, devices=2, on_cpu=True, slow=True),
    Check(19, "an exception on one of two ranks", ranks.one_rank_fails, devices=2, on_cpu=True, slow=True),
    Check(20, "bit-equal weights under deterministic algorithms, with dropout", unchanged.neutral, on_cpu=True),
    Check(21, "random states after a replay and FeatureMaps", unchanged.random_states, on_cpu=True, slow=True),
    Check(22, "gradients of 1e25, 1e-30 and 0", numbers.extreme_gradients, on_cpu=True),
    Check(
        23, "cuDNN LSTM, channels_last, sparse embedding, flash attention", numbers.kernels_of_libraries, on_cpu=True
    ),
    Check(24, "TF32 beside a user's hook", unchanged.tf32, on_cpu=True),
    Check(25, "resumed with SpikeClip on another device", unchanged.resumed_elsewhere, on_cpu=True),
)  # fmt: skip
