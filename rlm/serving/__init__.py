"""The HTTP server: routes, access control, the engine thread, streaming, the page, the tunnel."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "access": "AllowedHosts Keys is_loopback load_keys new_key read_origins",
    "app": "create_app",
    "engine": "Engine Limits",
    "http_server": "GracefulServer UVICORN listen local_url",
    "middleware": "SecurityMiddleware SecuritySettings add_cors",
    "models": "find_models load_replicas",
    "process": "server_process",
    "service": "Service",
    "tunnel": "Tunnel TunnelError",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
