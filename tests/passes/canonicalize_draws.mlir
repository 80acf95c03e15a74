// RUN: secc opt %s -p 'canonicalize' | filecheck %s

// Random numbers in the size of a tensor do not depend on its values, nor does what random ops fill. Where values of
// inputs decide the size, the tensor shows it.

sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "D0" kind "data" key "" dim 0
  sec.block "a" class "A" params 10 trainable 10
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    // CHECK: %h = sec.call "a" (%x)
    %h = sec.call "a" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], bf16, grad>
    // CHECK-NEXT: sec.glue "aten.rand.default" args "[B, 8], dtype=torch.bfloat16, device=device, pin_memory=False" at "m.py:3"
    %u = sec.glue "aten.rand_like.default" (%h) args "$0, pin_memory=False" at "m.py:3" : !sec.tensor<[B, 8], bf16>
    // CHECK-NEXT: sec.glue "aten.full.default" args "[B], 0.5, dtype=torch.float32, device=device, pin_memory=False"
    %p = sec.glue "aten.new_full.default" (%h) args "$0, [B], 0.5, dtype=torch.float32" : !sec.tensor<[B], f32>
    // CHECK-NEXT: sec.glue "aten.bernoulli.default"
    %v = sec.glue "aten.bernoulli.default" (%p) args "$0" : !sec.tensor<[B], f32>
    // CHECK-NEXT: sec.glue "aten.ones_like.default" (%h)
    %w = sec.glue "aten.ones_like.default" (%h) args "$0" : !sec.tensor<[B, 8], bf16>
    // CHECK-NEXT: %picked = sec.glue
    %picked = sec.glue "aten.nonzero.default" (%x) args "$0" : !sec.tensor<[D0, 2], i64>
    // CHECK-NEXT: sec.glue "aten.rand_like.default" (%picked)
    %z = sec.glue "aten.rand_like.default" (%picked) args "$0, dtype=torch.float32" : !sec.tensor<[D0, 2], f32>
    %s1 = sec.glue "aten.mul.Tensor" (%h, %u) args "$0, $1" : !sec.tensor<[B, 8], bf16, grad>
    %s2 = sec.glue "aten.mul.Tensor" (%s1, %w) args "$0, $1" : !sec.tensor<[B, 8], bf16, grad>
    %t1 = sec.glue "aten.sum.default" (%s2) args "$0" : !sec.tensor<[], f32, grad>
    %t2 = sec.glue "aten.sum.default" (%v) args "$0" : !sec.tensor<[], f32>
    %t3 = sec.glue "aten.sum.default" (%z) args "$0" : !sec.tensor<[], f32>
    %t4 = sec.glue "aten.add.Tensor" (%t1, %t2) args "$0, $1" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%t4, %t3) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}
