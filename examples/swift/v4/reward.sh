#!/usr/bin/env bash
# A reward model that sees pictures, from packed pairs whose scores are held near zero. 2 tensor-parallel processes.
# Flags of ms-swift 4. `megatune shims` makes a program of this name; without it write `megatune megatron`.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NPROC_PER_NODE=2 MAX_PIXELS=1003520 CUDA_VISIBLE_DEVICES=0,1 \
megatron rlhf \
    --rlhf_type rm --model Qwen/Qwen2.5-VL-7B-Instruct --finetune true \
    --dataset 'swift/RLAIF-V-Dataset#20000' --split_dataset_ratio 0.01 --packing true --max_length 8192 \
    --center_rewards_coefficient 0.01 \
    --tensor_model_parallel_size 2 --sequence_parallel true \
    --micro_batch_size 1 --global_batch_size 4 --num_train_epochs 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true --attention_backend flash \
    --output_dir megatron_output/Qwen2.5-VL-7B-Instruct --save_steps 200 --eval_steps 200 --save_safetensors true \
    --no_save_optim true --no_save_rng true \
    --dataloader_num_workers 8 --dataset_num_proc 8 --load_from_cache_file true
