#!/usr/bin/env bash
# The quick start of Megatron-SWIFT 4: on two processes a model learns its name, as a checkpoint of Megatron-Core, and
# tells it. `megatune shims` makes programs of these names; without them write `megatune` before both.
# checkpoint-xxx: the last one that training names.
CUDA_VISIBLE_DEVICES=0 \
swift export \
    --to_mcore true --model Qwen/Qwen2.5-7B-Instruct --torch_dtype bfloat16 --test_convert_precision true \
    --output_dir Qwen2.5-7B-Instruct-mcore

PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --mcore_model Qwen2.5-7B-Instruct-mcore --finetune true \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500' \
    --max_length 2048 --system 'You are a helpful assistant.' --model_name swift-robot --model_author swift \
    --tensor_model_parallel_size 2 --sequence_parallel true \
    --micro_batch_size 16 --global_batch_size 16 --num_train_epochs 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true \
    --output_dir megatron_output/Qwen2.5-7B-Instruct --save_steps 100 --save_safetensors false --no_save_optim true \
    --no_save_rng true \
    --dataloader_num_workers 4 --dataset_num_proc 4

CUDA_VISIBLE_DEVICES=0 \
swift export \
    --to_hf true --mcore_model megatron_output/Qwen2.5-7B-Instruct/checkpoint-xxx --torch_dtype bfloat16 \
    --test_convert_precision true \
    --output_dir megatron_output/Qwen2.5-7B-Instruct/checkpoint-xxx-hf

CUDA_VISIBLE_DEVICES=0 \
swift infer \
    --model megatron_output/Qwen2.5-7B-Instruct/checkpoint-xxx-hf \
    --stream true --temperature 0 --max_new_tokens 2048
