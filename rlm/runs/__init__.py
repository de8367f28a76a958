"""Run directories: atomic files, checkpoints, resume, signals, metrics, trackers, plots,
alerts."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "alerts": "new_alerts",
    "atomic_files": (
        "Journal append_lines lock_file read_lines read_log replace_file replace_json sync"
    ),
    "checkpoints": "check_space file_hash writing writing_beside",
    "directory": "RunDirectory check_writable git_commit",
    "plots": "BLUE GREY ORANGE accuracy_bars accuracy_over_time learning_curves",
    "resume": (
        "check_resumable checkpoint_tensors data_id differences restore_tensors resume_run "
        "run_origin"
    ),
    "trackers": "PROJECT TRACKER_NAMES check_project",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
