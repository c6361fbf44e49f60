/* train/device.h: a GPU that the driver lists but that "auto" does not use is told, with the reason. This
 * machine may have any hardware, so the files of the driver stand in a folder of the test. */
#define _DEFAULT_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/folder.h"
#include "train/device.h"

#include <sys/stat.h>

static void make(void **state, const char *const *folders)
{
    char path[4096];
    for (int i = 0; folders[i]; i++) assert_int_equal(mkdir(in_folder(path, state, folders[i]), 0700), 0);
}

/* Nothing is listed before the driver has made its files. Without a backend for the GPU, or with one that
 * finds none, a listed GPU is left. */
static void listed_gpus_are_told(void **state)
{
    const char *root = *state;
    error why = {0};
    assert_false(device_leaves_gpu(root, &why));
    make(state,
         (const char *const[]){"proc", "proc/driver", "proc/driver/nvidia", "proc/driver/nvidia/gpus", NULL});
    assert_false(device_leaves_gpu(root, &why)); // the driver is there, but no GPU
    train_device *device = device_open(&(device_options){.name = "cuda-plain"}, NULL);
    const bool usable = device != NULL;
    if (device) device->ops->close(device);
    make(state, (const char *const[]){"proc/driver/nvidia/gpus/0000:01:00.0", NULL});
    assert_int_equal(device_leaves_gpu(root, &why), !usable);
    assert_true(usable || strstr(why.text, "CUDA") != NULL);
}

static void a_device_file_is_a_listed_gpu(void **state)
{
    static const char *const files[] = {"dev/nvidia0", "dev/dxg"};
    const char *root = *state;
    char path[4096];
    error why = {0};
    make(state, (const char *const[]){"dev", NULL});
    train_device *device = device_open(&(device_options){.name = "cuda-plain"}, NULL);
    const bool usable = device != NULL;
    if (device) device->ops->close(device);
    for (int i = 0; i < 2; i++) {
        assert_false(device_leaves_gpu(root, &why));
        put_file(in_folder(path, state, files[i]), "", 0);
        assert_int_equal(device_leaves_gpu(root, &why), !usable);
        remove(path);
    }
}

/* NVML says on which GPUs a program computes. Without it, or with another library, nothing is known. */
static void nvml_says_which_gpus_are_free(void **state)
{
    (void)state;
    assert_int_equal(device_free_gpus(FAKE_NVML), 3);
    assert_int_equal(device_free_gpus("libm.so.6"), -1);
    assert_int_equal(device_free_gpus("/nowhere/libnvidia-ml.so"), -1);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, folder_setup, folder_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {IN_FOLDER(listed_gpus_are_told),
                                       IN_FOLDER(a_device_file_is_a_listed_gpu),
                                       cmocka_unit_test(nvml_says_which_gpus_are_free)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
