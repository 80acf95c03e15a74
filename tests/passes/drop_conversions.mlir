// RUN: secc opt %s -p drop-conversions | filecheck %s

// A conversion to the dtype and device that a tensor has goes, with or without `copy`; one to another dtype,
// out of the gradient's reach, into a memory format or layout, or into pinned memory stays. So does a copy that a block may tell from
// the tensor, by writing into one of them or by its strides.

sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "a" class "A" params 10 trainable 10
  sec.case "all" when [] {
    // CHECK: %x = sec.input "x"
    // CHECK-NEXT: %h = sec.call "a" (%x)
    // CHECK-NEXT: %half = sec.glue "aten._to_copy.default" (%h) args "$0, dtype=torch.bfloat16"
    %x = sec.input "x" : !sec.tensor<[B, 8, 4, 4], f32>
    %h = sec.call "a" (%x) args "$0" outs [""] : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %same = sec.glue "aten._to_copy.default" (%h) args "$0, dtype=torch.float32" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %there = sec.glue "aten._to_copy.default" (%same) args "$0, dtype=torch.float32, layout=torch.strided, device=device, pin_memory=False, non_blocking=True, memory_format=torch.preserve_format" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %forced = sec.glue "aten.to.dtype" (%there) args "$0, torch.float32, False, True" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %as = sec.glue "aten.to.other" (%forced, %x) args "$0, $1" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %half = sec.glue "aten._to_copy.default" (%as) args "$0, dtype=torch.bfloat16" : !sec.tensor<[B, 8, 4, 4], bf16, grad>

    // CHECK-NEXT: %fixed = sec.glue "aten._to_copy.default" (%h) args "$0, device=device" no_grad
    // CHECK-NEXT: %last = sec.glue "aten._to_copy.default" (%half) args "$0, memory_format=torch.channels_last"
    // CHECK-NEXT: %last2 = sec.glue "aten.to.dtype" (%last) args "$0, torch.bfloat16, False, False, torch.channels_last"
    // CHECK-NEXT: %opaque = sec.glue "aten._to_copy.default" (%last2) args "$0, layout=torch._mkldnn"
    // CHECK-NEXT: %pinned = sec.glue "aten._to_copy.default" (%opaque) args "$0, pin_memory=True"
    // CHECK-NEXT: %m = sec.glue "aten.mul.Tensor" (%pinned, %fixed)
    // CHECK-NEXT: %l = sec.glue "aten.sum.default" (%m)
    // CHECK-NEXT: sec.return (%l)
    %fixed = sec.glue "aten._to_copy.default" (%h) args "$0, device=device" no_grad : !sec.tensor<[B, 8, 4, 4], f32>
    %last = sec.glue "aten._to_copy.default" (%half) args "$0, memory_format=torch.channels_last" : !sec.tensor<[B, 8, 4, 4], bf16, grad>
    %last2 = sec.glue "aten.to.dtype" (%last) args "$0, torch.bfloat16, False, False, torch.channels_last" : !sec.tensor<[B, 8, 4, 4], bf16, grad>
    %opaque = sec.glue "aten._to_copy.default" (%last2) args "$0, layout=torch._mkldnn" : !sec.tensor<[B, 8, 4, 4], bf16, grad>
    %pinned = sec.glue "aten._to_copy.default" (%opaque) args "$0, pin_memory=True" : !sec.tensor<[B, 8, 4, 4], bf16, grad>
    %m = sec.glue "aten.mul.Tensor" (%pinned, %fixed) args "$0, $1" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %l = sec.glue "aten.sum.default" (%m) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
  sec.case "copies" when [] {
    // CHECK: %given = sec.glue "aten._to_copy.default"
    // CHECK-NEXT: sec.call "a" (%given)
    // CHECK: %rest = sec.glue "aten._to_copy.default"
    // CHECK: sec.call "a" (%row)
    // CHECK: %dense = sec.glue "aten._to_copy.default"
    // CHECK: sec.return
    %x = sec.input "x" : !sec.tensor<[B, 8, 4, 4], f32>
    %p = sec.glue "aten.exp.default" (%x) args "$0" : !sec.tensor<[B, 8, 4, 4], f32>
    %given = sec.glue "aten._to_copy.default" (%p) args "$0, dtype=torch.float32" : !sec.tensor<[B, 8, 4, 4], f32>
    %h = sec.call "a" (%given) args "$0" outs [""] : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %q = sec.glue "aten.exp.default" (%h) args "$0" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %rest = sec.glue "aten._to_copy.default" (%q) args "$0, dtype=torch.float32" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %row = sec.glue "aten.slice.Tensor" (%q) args "$0, 1, 0, 4" : !sec.tensor<[B, 4, 4, 4], f32, grad>
    %g = sec.call "a" (%row) args "$0" outs [""] : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %k = sec.glue "aten.add.Tensor" (%g, %rest) args "$0, $1" : !sec.tensor<[B, 8, 4, 4], f32, grad>
    %one = sec.glue "aten.sum.dim_IntList" (%k) args "$0, [3], True" : !sec.tensor<[B, 8, 4, 1], f32, grad>
    %two = sec.glue "aten.expand.default" (%one) args "$0, [B, 8, 4, 2]" : !sec.tensor<[B, 8, 4, 2], f32, grad>
    %dense = sec.glue "aten._to_copy.default" (%two) args "$0, dtype=torch.float32" : !sec.tensor<[B, 8, 4, 2], f32, grad>
    %c = sec.glue "aten.view_as_complex.default" (%dense) args "$0" : !sec.tensor<[B, 8, 4], c64, grad>
    %m = sec.glue "aten.abs.default" (%c) args "$0" : !sec.tensor<[B, 8, 4], f32, grad>
    %l = sec.glue "aten.sum.default" (%m) args "$0" : !sec.tensor<[], f32, grad>
    sec.return (%l)
  }
}
