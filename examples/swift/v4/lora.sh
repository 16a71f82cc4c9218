#!/usr/bin/env bash
# LoRA on every linear layer, on 2 tensor-parallel processes.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --model Qwen/Qwen2.5-7B-Instruct --finetune true --tuner_type lora --lora_rank 8 --lora_alpha 32 \
    --target_modules all-linear --merge_lora false \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500' \
    --max_length 2048 --system 'You are a helpful assistant.' --model_name swift-robot --model_author swift \
    --tensor_model_parallel_size 2 --sequence_parallel true \
    --micro_batch_size 16 --global_batch_size 16 --num_train_epochs 1 \
    --lr 1e-4 --min_lr 1e-5 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true \
    --output_dir megatron_output/Qwen2.5-7B-Instruct --save_steps 100 --save_safetensors true --no_save_optim true \
    --no_save_rng true \
    --dataloader_num_workers 4 --dataset_num_proc 4
