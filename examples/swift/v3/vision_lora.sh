#!/usr/bin/env bash
# LoRA on the language part of a vision-language model, with pictures of a megapixel at most. 2 processes.
# Flags of ms-swift 3. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=2 MAX_PIXELS=1003520 CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --load Qwen2.5-VL-7B-Instruct-mcore --finetune true --train_type lora --lora_rank 8 --lora_alpha 32 \
    --target_modules all-linear --freeze_llm false --freeze_vit true --freeze_aligner true \
    --dataset 'AI-ModelScope/LaTeX_OCR:human_handwrite#5000' --split_dataset_ratio 0.01 --packing true \
    --max_length 2048 \
    --tensor_model_parallel_size 1 --sequence_parallel true \
    --micro_batch_size 1 --global_batch_size 4 --max_epochs 1 \
    --lr 1e-4 --min_lr 1e-5 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --vit_gradient_checkpointing true \
    --cross_entropy_loss_fusion true \
    --save megatron_output/Qwen2.5-VL-7B-Instruct --save_interval 200 --no_save_optim true --no_save_rng true \
    --num_workers 4 --dataset_num_proc 8
