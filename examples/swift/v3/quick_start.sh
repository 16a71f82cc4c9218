#!/usr/bin/env bash
# The quick start of Megatron-SWIFT 3: on two processes a model learns its name, as a checkpoint of Megatron-Core, and
# tells it. `megatune shims` makes programs of these names; without them write `megatune` before both.
CUDA_VISIBLE_DEVICES=0 \
swift export \
    --to_mcore true --model Qwen/Qwen2.5-7B-Instruct --torch_dtype bfloat16 \
    --output_dir Qwen2.5-7B-Instruct-mcore

NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --load Qwen2.5-7B-Instruct-mcore --finetune true \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500' \
    --max_length 2048 --system 'You are a helpful assistant.' --model_name swift-robot --model_author swift \
    --tensor_model_parallel_size 2 \
    --micro_batch_size 4 --global_batch_size 16 --train_iters 100 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_iters 10 \
    --recompute_granularity selective \
    --cross_entropy_loss_fusion true \
    --save megatron_output/Qwen2.5-7B-Instruct --save_interval 100 --eval_iters 5 --no_save_optim true \
    --no_save_rng true \
    --num_workers 4 --dataset_num_proc 4

CUDA_VISIBLE_DEVICES=0 \
swift export \
    --to_hf true --mcore_model megatron_output/Qwen2.5-7B-Instruct --torch_dtype bfloat16 \
    --output_dir megatron_output/Qwen2.5-7B-Instruct-hf

CUDA_VISIBLE_DEVICES=0 \
swift infer \
    --model megatron_output/Qwen2.5-7B-Instruct-hf \
    --stream true --temperature 0 --max_new_tokens 2048
