// RUN: secc opt %s -p 'canonicalize,dce' | filecheck %s

// Glue that changes neither a value nor a gradient goes; of equal ops one stays.

sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "a" class "A" params 10 trainable 10
  sec.case "all" when [] {
    // CHECK: %x = sec.input
    // CHECK-NEXT: %h = sec.call "a" (%x)
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %again = sec.input "x" : !sec.tensor<[B, 8], f32>
    %h = sec.call "a" (%again) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>

    // A cast to the dtype it has, a view in the shape it has, + 0 and * 1, the detach of an input.
    %same = sec.glue "aten._to_copy.default" (%h) args "$0, dtype=torch.float32" : !sec.tensor<[B, 8], f32, grad>
    %shape = sec.glue "aten.view.default" (%same) args "$0, [B, 8]" : !sec.tensor<[B, 8], f32, grad>
    %zero = sec.glue "aten.add.Tensor" (%shape) args "$0, 0" : !sec.tensor<[B, 8], f32, grad>
    %one = sec.glue "aten.mul.Tensor" (%zero) args "$0, 1" : !sec.tensor<[B, 8], f32, grad>
    %fixed = sec.glue "aten.detach.default" (%x) args "$0" : !sec.tensor<[B, 8], f32>
    // CHECK-NEXT: %sum = sec.glue "aten.add.Tensor" (%h, %x)
    %sum = sec.glue "aten.add.Tensor" (%one, %fixed) args "$0, $1" : !sec.tensor<[B, 8], f32, grad>

    // Two views become one, swaps of dims that cancel none.
    // CHECK-NEXT: sec.glue "aten.view.default" (%sum) args "$0, [2*B, 2, 2]"
    %v = sec.glue "aten.view.default" (%sum) args "$0, [2*B, 4]" : !sec.tensor<["2*B", 4], f32, grad>
    %w = sec.glue "aten.view.default" (%v) args "$0, [2*B, 2, 2]" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %t = sec.glue "aten.transpose.int" (%w) args "$0, 1, -1" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %back = sec.glue "aten.permute.default" (%t) args "$0, [0, 2, 1]" : !sec.tensor<["2*B", 2, 2], f32, grad>

    // What differs in grad mode is not equal, and the detach of something trainable stays.
    // CHECK-NEXT: %p = sec.glue "aten.exp.default" (%w) args "$0" :
    // CHECK-NEXT: %r = sec.glue "aten.exp.default" (%w) args "$0" no_grad
    // CHECK-NEXT: %d = sec.glue "aten.detach.default" (%p)
    %p = sec.glue "aten.exp.default" (%back) args "$0" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %q = sec.glue "aten.exp.default" (%back) args "$0" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %r = sec.glue "aten.exp.default" (%back) args "$0" no_grad : !sec.tensor<["2*B", 2, 2], f32>
    %d = sec.glue "aten.detach.default" (%p) args "$0" : !sec.tensor<["2*B", 2, 2], f32>

    // One of the rows that a tensor was expanded to is that tensor; other parts of them stay.
    // CHECK: sec.call "a" (%k) args
    // CHECK: %e2 = sec.glue "aten.slice.Tensor"
    %k = sec.glue "aten.ones.default" args "[1, 8]" : !sec.tensor<[1, 8], f32>
    %e = sec.glue "aten.expand.default" (%k) args "$0, [B, -1]" : !sec.tensor<[B, 8], f32>
    %e1 = sec.glue "aten.slice.Tensor" (%e) args "$0, 0, 0, 1" : !sec.tensor<[1, 8], f32>
    %f1 = sec.call "a" (%e1) args "$0" outs [""] : !sec.tensor<[1, 8], f32, grad>
    %e2 = sec.glue "aten.slice.Tensor" (%e) args "$0, 1, 0, 1" : !sec.tensor<[B, 1], f32>
    %f2 = sec.call "a" (%e2) args "$0" outs [""] : !sec.tensor<[B, 1], f32, grad>

    // Random ops are never equal.
    // CHECK: sec.glue "aten.rand.default"
    // CHECK-NEXT: sec.glue "aten.rand.default"
    %u1 = sec.glue "aten.rand.default" args "[2*B, 2, 2]" : !sec.tensor<["2*B", 2, 2], f32>
    %u2 = sec.glue "aten.rand.default" args "[2*B, 2, 2]" : !sec.tensor<["2*B", 2, 2], f32>

    // The square of a norm is a sum of squares.
    // CHECK-NEXT: %[[SQUARE:.*]] = sec.glue "aten.mul.Tensor" (%h) args "$0, $0"
    // CHECK-NEXT: %n2 = sec.glue "aten.sum.dim_IntList" (%[[SQUARE]]) args "$0, [-1], True"
    %n = sec.glue "aten.linalg_vector_norm.default" (%h) args "$0, 2, [-1], True" : !sec.tensor<[B, 1], f32, grad>
    %n2 = sec.glue "aten.mul.Tensor" (%n) args "$0, $0" : !sec.tensor<[B, 1], f32, grad>

    // CHECK: %s1 = sec.glue "aten.add.Tensor" (%p, %p)
    %s1 = sec.glue "aten.add.Tensor" (%p, %q) args "$0, $1" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %s2 = sec.glue "aten.add.Tensor" (%s1, %r) args "$0, $1" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %s3 = sec.glue "aten.add.Tensor" (%s2, %d) args "$0, $1" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %s4 = sec.glue "aten.add.Tensor" (%s3, %u1) args "$0, $1" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %s5 = sec.glue "aten.mul.Tensor" (%s4, %u2) args "$0, $1" : !sec.tensor<["2*B", 2, 2], f32, grad>
    %s6 = sec.glue "aten.sum.default" (%s5) args "$0" : !sec.tensor<[], f32, grad>
    %f3 = sec.glue "aten.sum.default" (%f1) args "$0" : !sec.tensor<[], f32, grad>
    %f4 = sec.glue "aten.sum.default" (%f2) args "$0" : !sec.tensor<[], f32, grad>
    %f5 = sec.glue "aten.sum.default" (%n2) args "$0" : !sec.tensor<[], f32, grad>
    %s8 = sec.glue "aten.add.Tensor" (%f4, %f5) args "$0, $1" : !sec.tensor<[], f32, grad>
    %s7 = sec.glue "aten.add.Tensor" (%s6, %f3) args "$0, $1" : !sec.tensor<[], f32, grad>
    %loss = sec.glue "aten.add.Tensor" (%s7, %s8) args "$0, $1" : !sec.tensor<[], f32, grad>
    sec.return (%loss)
  }
}
