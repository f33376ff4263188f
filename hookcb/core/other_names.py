"""Names that Keras, Lightning, fastai and Hugging Face have for arguments, and what hookcb has for them."""

from collections.abc import Mapping

ALIKE = (  # names of hookcb, and those of others for the same
    {"n_epoch", "epochs", "epoch", "n_epochs", "max_epochs", "num_epochs", "nb_epochs", "num_train_epochs"},
    {"cbs", "cb", "callbacks", "callback"},
    {"lr", "lr_max", "learning_rate", "max_lr", "base_lr", "swa_lrs"},
    {"wd", "weight_decay"},
    {"opt_func", "optimizer", "opt", "optim", "optimizers"},
    {"loss_func", "loss", "loss_fn", "criterion"},
    {
        "dls",
        "dataloaders",
        "train_dataloaders",
        "train_loader",
        "dl",
        "dataloader",
        "loader",
        "batch",
        "data",
    },
    {"model", "net", "module", "models"},
    {"resume", "ckpt_path", "resume_from_checkpoint", "initial_epoch", "start_epoch"},
    {"steps", "n_steps", "num_steps", "max_steps"},
    {"scaler", "grad_scaler"},
    {"device", "accelerator"},
    {"folder", "dirpath", "filepath", "save_dir", "log_dir", "output_dir"},
    {"path", "file", "filename", "filepath", "fname", "save_dir", "ckpt_path"},
    {
        "every",
        "save_freq",
        "save_steps",
        "every_n_train_steps",
        "log_every_n_steps",
        "logging_steps",
        "log_freq",
    },
    {"patience", "early_stopping_patience", "early_stopping_rounds"},
    {"keep", "save_total_limit", "max_to_keep"},
    {"max_norm", "gradient_clip_val", "max_grad_norm", "clipnorm", "grad_clip"},
    {"value", "clipvalue", "clip_value"},
    {"n", "accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps"},
    {"dtype", "precision", "mixed_precision"},
    {"decay", "momentum", "beta"},
    {"start", "swa_epoch_start"},
    {"min_delta", "threshold"},
    {"mode", "comp", "strategy"},
    {"seconds", "duration", "max_time"},
    {"warmup", "warmup_steps", "num_warmup_steps", "warmup_ratio"},
    {"num_it", "num_iter", "num_training", "num_training_steps"},
    {"start_lr", "min_lr"},
    {"end_lr", "max_lr"},
    {"modules", "layers"},
    {"input_size", "input_shape"},
)
# what to use where no argument of the function stands for a name of others
_PLACES = {
    "Learner((train, valid), model), whose batches are (x, y)": (
        "x y train_dataloaders val_dataloaders datamodule train_dataset eval_dataset validation_data "
        "validation_split train_data valid_data"
    ),
    "DataLoader(dataset, batch_size=…, shuffle=…)": (
        "batch_size validation_batch_size shuffle num_workers per_device_train_batch_size "
        "per_device_eval_batch_size"
    ),
    "opt_func= and lr= of Learner": "optimizer optimizers optim learning_rate",
    "opt_func=lambda _, lr: AdamW(groups, lr=lr)": "splitter param_groups",
    "loss_func= of Learner": "loss loss_fn criterion",
    "a loss_func with weights, such as nn.CrossEntropyLoss(weight=…)": (
        "class_weight sample_weight loss_weights"
    ),
    "metrics= of Learner": "metrics eval_metric eval_metrics weighted_metrics compute_metrics",
    "learn.fit(n_epoch)": "epochs n_epochs num_epochs max_epochs min_epochs num_train_epochs",
    "learn.fit_one_cycle(n_epoch, moms=(0.95, 0.85))": "moms",
    "learn.fit(…, cbs=Checkpoint(folder), resume='latest')": (
        "initial_epoch ckpt_path resume_from_checkpoint start_epoch"
    ),
    "GradientAccumulation(n) among cbs": (
        "accumulate_grad_batches gradient_accumulation_steps accumulation_steps"
    ),
    "GradientClip(max_norm), or value=, among cbs": (
        "gradient_clip_val gradient_clip_algorithm max_grad_norm clipnorm clipvalue global_clipnorm grad_clip"
    ),
    "MixedPrecision('bf16') or MixedPrecision('fp16') among cbs": "precision mixed_precision amp fp16 bf16",
    "Distributed() among cbs, and torchrun": "devices num_nodes strategy n_gpu gpus use_distributed_sampler",
    "nn.SyncBatchNorm.convert_sync_batchnorm(model)": "sync_batchnorm",
    "Learner(device='auto')": "accelerator use_cpu no_cuda",
    "Schedule(partial(StepLR, step_size=3)) among cbs": (
        "scheduler lr_scheduler lr_schedule lr_scheduler_type"
    ),
    "WarmupCosine(), or OneCycle(), among cbs": "warmup_steps warmup_ratio num_warmup_steps",
    "Log(logger, every=…) among cbs": (
        "logger loggers report_to log_every_n_steps logging_steps log_freq log_interval log tracker"
    ),
    "Checkpoint(folder) among cbs": (
        "enable_checkpointing save_strategy save_steps default_root_dir output_dir model_dir"
    ),
    "monitor=, whose best epoch is best.pt": "save_best_only load_best_model_at_end",
    "keep=, the number of newest files": "save_last",
    "learn.save(file, with_opt=False)": "save_weights_only weights_only",
    "folder=, in which files have names of their own": "filename fname",
    "every=, in training batches; a file is written after each epoch, too": "every_n_epochs",
    "EarlyStopping(patience=3) among cbs": "early_stopping early_stopping_patience",
    "MaxTime(seconds) among cbs": "max_time",
    "Compile() among cbs": "compile torch_compile jit_compile",
    "StepTimer() or ProfilerCallback() among cbs": "profiler",
    "NanTrace() or DetectAnomaly() among cbs": "detect_anomaly",
    "ActivationStats(with_hist=True) among cbs, beside Log(logger)": "histogram_freq",
    "learn.no_logging() or learn.no_bar()": (
        "verbose enable_progress_bar progress_bar disable_tqdm refresh_rate"
    ),
    "learn.summary()": "enable_model_summary",
    "module_summary(model, x)": "input_data",
    "learn.one_batch()": "fast_dev_run",
    "learn.validate() before the fit": "num_sanity_val_steps",
    "a callback that raises CancelTrainException in after_batch": "limit_train_batches steps_per_epoch",
    "a callback that raises CancelFitException in after_batch": "max_steps min_steps",
    "a callback that raises CancelValidException in before_validate": (
        "check_val_every_n_epoch validation_freq val_check_interval eval_strategy eval_steps "
        "limit_val_batches validation_steps"
    ),
    "diagnose(model, batch, loss_func)": "overfit_batches",
    "set_seed(42, reproducible=True)": "deterministic",
    "set_seed(42)": "seed",
    "torch.backends.cudnn.benchmark = True": "benchmark",
}
ELSEWHERE: Mapping[str, str] = {name: place for place, names in _PLACES.items() for name in names.split()}
