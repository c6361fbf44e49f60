// Replaces train/cuda/device.cuh.
#pragma once
#include "emulator.h"
#include <algorithm>

#define TRAIN_DEVICE inline
