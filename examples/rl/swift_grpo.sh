#!/usr/bin/env bash
# GRPO on problems with a solution, on 8 GPUs, time-shared by training and sampling, with rewards for the answer and its form.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron rlhf \
    --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct \
    --dataset open-r1/DAPO-Math-17k-Processed \
    --num_train_epochs 1 --global_batch_size 64 --micro_batch_size 1 --steps_per_generation 4 --num_generations 8 \
    --reward_funcs accuracy format \
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.7 --vllm_max_model_len 9216 \
    --max_length 1024 --max_completion_length 8192 \
    --tensor_model_parallel_size 4 --pipeline_model_parallel_size 1 --sequence_parallel true \
    --lr 1e-6 --bf16 true --beta 0.001 --importance_sampling_level token --epsilon 0.2 --epsilon_high 0.28 \
    --dynamic_sample false --overlong_filter true --loss_type grpo --sleep_level 2 --offload_model true \
    --offload_bridge false --offload_optimizer true --log_completions true \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --attention_backend flash --temperature 1.0 --padding_free true \
    --output_dir megatron_output/Qwen2.5-7B-Instruct --logging_steps 1 --save_steps 100 --finetune true \
    --dataloader_num_workers 8 --dataset_num_proc 8 --no_save_optim true --no_save_rng true
