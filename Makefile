# The short way to everything; CMake does the work.
BUILD ?= build
# nproc obeys OpenMP's variables
JOBS  ?= $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)

all: $(BUILD)/CMakeCache.txt
	cmake --build $(BUILD) -j$(JOBS)

$(BUILD)/CMakeCache.txt:
	cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release

demo:  ; tools/demo.sh $(BUILD)
test:  ; tools/test.sh $(BUILD)
quick: all
	ctest --test-dir $(BUILD) -j$(JOBS) --output-on-failure -E '^(install|newcomer|tools|test_train_stops)$$'
format: ; clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')
clean: ; rm -rf $(BUILD)

.PHONY: all demo test quick format clean
