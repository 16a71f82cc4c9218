#!/usr/bin/env bash
# A vision-language model whose language part is trained whole; sizes of pictures in tokens. 2 processes.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=2 IMAGE_MAX_TOKEN_NUM=1024 \
VIDEO_MAX_TOKEN_NUM=128 FPS_MAX_FRAMES=16 CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --model Qwen/Qwen3-VL-8B-Instruct --finetune true --freeze_llm false --freeze_vit true --freeze_aligner true \
    --dataset 'AI-ModelScope/LaTeX_OCR:human_handwrite#5000' --split_dataset_ratio 0.01 --packing true \
    --max_length 2048 \
    --tensor_model_parallel_size 2 --sequence_parallel true \
    --micro_batch_size 1 --global_batch_size 4 --num_train_epochs 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true \
    --output_dir megatron_output/Qwen3-VL-8B-Instruct --save_steps 200 --save_safetensors true --no_save_optim true \
    --no_save_rng true \
    --dataloader_num_workers 4 --dataset_num_proc 8 --load_from_cache_file true
