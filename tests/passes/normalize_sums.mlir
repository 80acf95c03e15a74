// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// Every reduction of a weighted sum has its own divisor: a number of samples, a number of entries, a function of a mask's sum. What is
// added once is the constant.

sec.graph "distil" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "teacher" class "LM" params 10 trainable 0
  sec.block "student" class "LM" params 10 trainable 10
  sec.case "all" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, S], i64>
    %mask = sec.input "mask" : !sec.tensor<[B, S], f32>
    %t = sec.call "teacher" (%ids) args "$0" outs [""] no_grad : !sec.tensor<[B, S, 16], f32>
    %x = sec.call "student" (%ids) args "$0" outs [""] : !sec.tensor<[B, S, 16], f32, grad>

    // kl_div(batchmean): the sum of exp(t) * (t - log_softmax(x)) by the number of samples
    %y = sec.glue "aten._log_softmax.default" (%x) args "$0, -1, False" : !sec.tensor<[B, S, 16], f32, grad>
    %d = sec.glue "aten.sub.Tensor" (%t, %y) args "$0, $1" : !sec.tensor<[B, S, 16], f32, grad>
    %e = sec.glue "aten.exp.default" (%t) args "$0" : !sec.tensor<[B, S, 16], f32>
    %p = sec.glue "aten.mul.Tensor" (%e, %d) args "$0, $1" : !sec.tensor<[B, S, 16], f32, grad>
    %sum = sec.glue "aten.sum.default" (%p) args "$0" at "model.py:5" : !sec.tensor<[], f32, grad>
    %kl = sec.glue "aten.div.Tensor" (%sum) args "$0, B" : !sec.tensor<[], f32, grad>

    // mse_loss: by the number of entries
    %mse = sec.glue "aten.mse_loss.default" (%x, %t) args "$0, $1" at "model.py:6" : !sec.tensor<[], f32, grad>

    // (rows * mask).sum() / mask.sum().clamp(min=1)
    %rows = sec.glue "aten.sum.dim_IntList" (%p) args "$0, [-1]" : !sec.tensor<[B, S], f32, grad>
    %kept = sec.glue "aten.mul.Tensor" (%rows, %mask) args "$0, $1" : !sec.tensor<[B, S], f32, grad>
    %above = sec.glue "aten.sum.default" (%kept) args "$0" at "model.py:7" : !sec.tensor<[], f32, grad>
    %below = sec.glue "aten.sum.default" (%mask) args "$0" at "model.py:7" : !sec.tensor<[], f32>
    %atleast = sec.glue "aten.clamp.default" (%below) args "$0, 1" : !sec.tensor<[], f32>
    %masked = sec.glue "aten.div.Tensor" (%above, %atleast) args "$0, $1" : !sec.tensor<[], f32, grad>

    %a = sec.glue "aten.add.Tensor" (%kl, %mse) args "$0, $1, alpha=0.3" : !sec.tensor<[], f32, grad>
    %b = sec.glue "aten.sub.Tensor" (%a, %masked) args "$0, $1" : !sec.tensor<[], f32, grad>
    %c = sec.glue "aten.add.Tensor" (%b) args "$0, 2.5" : !sec.tensor<[], f32, grad>
    sec.return (%c)

    // CHECK: [[MSE:%[0-9]+]] = sec.glue "aten.mse_loss.default" (%x, %t) args "$0, $1, reduction=2"
    // CHECK-NEXT: [[B:%[0-9]+]] = sec.size "B"
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[B]])
    // CHECK-NEXT: sec.term "kl" (%sum, [[SHARE]]) at "model.py:5"
    // CHECK-NEXT: [[N:%[0-9]+]] = sec.size "16*B*S"
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[N]])
    // CHECK-NEXT: [[WEIGHTED:%[0-9]+]] = sec.glue "aten.mul.Tensor" ([[SHARE]]) args "$0, 0.3"
    // CHECK-NEXT: sec.term "mse" ([[MSE]], [[WEIGHTED]]) at "model.py:6"
    // CHECK-NEXT: [[LEAF:%[0-9]+]] = sec.leaf "kl_1.count" (%below)
    // CHECK-NEXT: [[ATLEAST:%[0-9]+]] = sec.glue "aten.clamp.default" ([[LEAF]]) args "$0, 1"
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.reciprocal.default" ([[ATLEAST]])
    // CHECK-NEXT: [[MINUS:%[0-9]+]] = sec.glue "aten.mul.Tensor" ([[SHARE]]) args "$0, -1.0"
    // CHECK-NEXT: sec.term "kl_1" (%above, [[MINUS]]) at "model.py:7"
    // CHECK-NEXT: sec.return constant "2.5"
  }
}
