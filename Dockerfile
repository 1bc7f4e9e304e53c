# polyfed from its wheel, with the dependencies of constraints.txt:
#
#   python -m build --wheel
#   docker build --tag polyfed .
#
# TORCH_INDEX: of PyTorch's wheels, that for the CPU for an image without CUDA. EXTRAS: as "[ray]".
# The user in the image has the number 1000; /work is where a folder is mounted.

FROM python:3.12-slim
ARG TORCH_INDEX=""
ARG EXTRAS=""
COPY constraints.txt dist/polyfed-*.whl /wheel/
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --no-cache-dir --constraint /wheel/constraints.txt --no-deps --index-url "$TORCH_INDEX" torch; \
    fi \
    && for wheel in /wheel/*.whl; do \
        pip install --no-cache-dir --constraint /wheel/constraints.txt "$wheel$EXTRAS" || exit; \
    done
RUN useradd --create-home --uid 1000 polyfed && mkdir /work && chown polyfed /work
USER 1000
WORKDIR /work
ENTRYPOINT ["polyfed"]
CMD ["--help"]
